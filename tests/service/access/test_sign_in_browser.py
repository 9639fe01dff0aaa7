"""Signing in, exporting a checkpoint and signing out, driven in headless Chromium."""

import shutil

from playwright.sync_api import expect, sync_playwright

from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.tiny_run import copy_tiny_run


def test_browser_signs_in_exports_by_button_and_signs_out(tmp_path):
    root, data = tmp_path / "store", tmp_path / "control-plane"
    root.mkdir()
    copy_tiny_run(root)
    made = cairn_here(
        *("keys", "create", "--name", "ana", "--scope", "operate", "--data-dir", str(data)),
        CAIRN_ROOT=str(root),
    )
    assert made.returncode == 0, made.stderr
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH; `make test` installs it"
    with (
        running_plane(root, tmp_path, {"CAIRN_AUTH": "keys"}) as (url, _),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
        )
        page = browser.new_page(locale="en-US")
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.goto(f"{url}/ui/default/tiny")
        expect(page).to_have_url(f"{url}/sign-in?next=%2Fui%2Fdefault%2Ftiny")
        page.get_by_label("Key").fill(made.stdout.strip())
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{url}/ui/default/tiny")
        page.goto(f"{url}/ui/default/tiny/steps/2")
        page.get_by_role("button", name="Export", exact=True).click()
        card = page.locator(".operation").first
        expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
        page.get_by_role("button", name="Promote").click()
        expect(page.get_by_role("alert")).to_contain_text("production now points to step 2")
        expect(page.get_by_role("link", name="Keys")).to_have_count(0)
        assert page.evaluate("document.cookie") == ""
        page.goto(f"{url}/ui/default/tiny")
        page.context.clear_cookies()  # its session is over
        page.evaluate("renew()")
        expect(page).to_have_url(f"{url}/sign-in?next=%2Fui%2Fdefault%2Ftiny")
        page.get_by_label("Key").fill(made.stdout.strip())
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{url}/ui/default/tiny")
        page.wait_for_load_state()  # a click before its scripts are there does nothing
        page.get_by_role("button", name="Sign out").click()
        expect(page).to_have_url(f"{url}/sign-in")
        page.goto(url)
        expect(page.get_by_label("Key")).to_be_visible()
        browser.close()
        assert problems == []
