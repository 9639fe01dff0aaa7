"""Files of a step are kept from its page, and what plain Orbax has saved is adopted from one."""

from playwright.sync_api import expect

STEP = "/ui/default/tiny/steps/2"


def test_file_of_a_step_is_downloaded_as_it_lies_in_the_store(page, trained, tmp_path):
    page.goto(STEP)
    page.get_by_role("link", name="Files", exact=True).click()
    names = page.get_by_role("table").last.locator("td.title a").all_text_contents()
    values = next(name for name in names if "/d/" in name)
    for name in ("_CHECKPOINT_METADATA", values):
        with page.expect_download() as download:
            page.get_by_role("link", name=name, exact=True).click()
        target = tmp_path / "file"
        download.value.save_as(target)
        assert download.value.suggested_filename == name.rpartition("/")[2]
        assert target.read_bytes() == (trained / "tiny/attempts/1/2" / name).read_bytes()
    expect(page.get_by_role("heading", name="Files of the step")).to_be_visible()
