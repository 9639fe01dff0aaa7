import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import CheckpointRef, InvalidURIError, StoreURI, parse_ref, parse_uri

_PLAIN = string.ascii_letters + string.digits + "._- +=@~,'()äß漢"
segments = st.text(_PLAIN, min_size=1, max_size=12).filter(lambda text: text not in (".", ".."))
paths = st.lists(segments, max_size=4).map("/".join)
buckets = st.from_regex(r"[a-z0-9][a-z0-9._-]{1,20}[a-z0-9]", fullmatch=True)
uris = st.one_of(
    st.builds(StoreURI, st.sampled_from(["gs", "s3"]), buckets, paths),
    st.builds(StoreURI, st.sampled_from(["file", "memory"]), st.just(""), paths),
)


@given(uris)
def test_parsing_what_was_formatted_gives_it_back(uri):
    assert parse_uri(str(uri)) == uri


@given(uris, segments, segments)
def test_a_child_knows_its_name_and_parent(uri, first, second):
    child = uri / f"{first}/{second}"
    assert child.name == second
    assert child.parent.parent == uri


@given(uris, segments)
def test_kvstore_folder_is_the_uri_with_a_slash(uri, name):
    spec = (uri / name).kvstore_spec()
    assert spec["path"].endswith(f"{name}/")
    assert not spec["path"].endswith("//")


@given(st.text(max_size=40))
def test_whatever_the_text_it_parses_or_is_refused(text):
    try:
        uri = parse_uri(text)
    except InvalidURIError:
        return
    assert ".." not in uri.path.split("/")
    assert parse_uri(str(uri)) == uri


def test_plain_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_uri("./cairn-store").local_path == os.path.join(os.getcwd(), "cairn-store")
    assert parse_uri(tmp_path / "a").local_path == str(tmp_path / "a")
    assert parse_uri("/").path == ""
    assert str(parse_uri("/a/b/")) == "file:///a/b"


def test_every_form_of_a_uri():
    uri = parse_uri("gs://my-bucket/runs/demo/")
    assert (uri.scheme, uri.bucket, uri.path) == ("gs", "my-bucket", "runs/demo")
    assert str(uri) == uri.orbax_path() == "gs://my-bucket/runs/demo"
    assert uri.kvstore_spec() == {"driver": "gcs", "bucket": "my-bucket", "path": "runs/demo/"}
    assert parse_uri("s3://my-bucket").kvstore_spec()["path"] == ""
    assert parse_uri("gs://my-bucket").name == "my-bucket"
    local = parse_uri("file:///data/runs")
    assert local.orbax_path() == local.local_path == "/data/runs"
    assert local.kvstore_spec() == {"driver": "file", "path": "/data/runs/"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "default=gs://my-bucket/x",
        "gs://b/../../etc/passwd",
        "gs://my-bucket/../x",
        "s3://my-bucket--use1-az4--x-s3/x",  # a directory bucket
        "gs://my-bucket/a//b",
        "gs://my-bucket/./b",
        "gs://my-bucket/a/..",
        "gs:///a",
        "gs://ab/x",
        "gs://UPPER/x",
        "gs-x/../../etc/passwd",
        "GS://my-bucket/x",
        "http://169.254.169.254/computeMetadata/v1/",
        "https://example.org/x",
        "simplecache::file:///etc/passwd",
        "filecache::gs://my-bucket/x",
        "dir::file:///etc",
        "zip://a.zip::gs://my-bucket/x",
        "gs://my-bucket/a::b",
        "ftp://host/x",
        "data:text/plain,hello",
        "reference://x",
        "github://owner:repo@/x",
        "gcs://my-bucket/x",
        "file://host/x",
        "file:/x",
        "file:x",
        "file:///a/../b",
        "file:////a",
        "gs://my-bucket/%2e%2e/x",
        "gs://my-bucket/a?b",
        "gs://my-bucket/a#b",
        "gs://my-bucket/a\\..\\b",
        "gs://my-bucket/a\x00b",
        "gs://my-bucket/a\nb",
        "gs://my-bucket/a\u2028b",
        "gs://my-bucket/\ud800",
        "/a/../../etc",
        "../x",
        "~/x",
        "~root/x",
        "a" * 5000,
        "gs://my-bucket/" + "a" * 300,
    ],
)
def test_hostile_and_foreign_uris_are_refused(text):
    with pytest.raises(InvalidURIError) as caught:
        parse_uri(text)
    assert caught.value.expected
    assert caught.value.found
    assert len(str(caught.value)) < 1000


def test_a_foreign_scheme_is_told_the_allowed_ones():
    with pytest.raises(InvalidURIError, match=r"gs://bucket/path.*file:///path.*found 'http:'"):
        parse_uri("http://example.org/run")


@pytest.mark.parametrize("name", ["..", ".", "", "a/../b", "/a", "a//b", "a\\b", "a%2eb", "a::b"])
def test_joining_refuses_what_parsing_refuses(name):
    with pytest.raises(InvalidURIError):
        _ = parse_uri("gs://my-bucket/x") / name


def test_the_root_has_no_parent():
    with pytest.raises(InvalidURIError, match="no parent"):
        _ = parse_uri("gs://my-bucket").parent


def test_only_a_file_uri_has_a_local_path():
    with pytest.raises(InvalidURIError, match="not on this machine"):
        _ = parse_uri("gs://my-bucket/x").local_path


refs = st.one_of(
    st.builds(CheckpointRef, st.builds(lambda u: u / "run", uris)),
    st.builds(
        lambda uri, alias: CheckpointRef(uri / "run", alias=alias),
        uris,
        st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(
            lambda alias: alias != "latest"
        ),
    ),
    st.builds(
        lambda uri, step: CheckpointRef(uri / "run", step=step),
        uris,
        st.integers(0, 10**18 - 1),
    ),
)


@given(refs)
def test_parsing_a_formatted_reference_gives_it_back(ref):
    assert parse_ref(str(ref)) == ref


def test_references_name_the_latest_an_alias_or_a_step(tmp_path):
    run = parse_uri("gs://my-bucket/runs/demo")
    assert parse_ref(str(run)) == CheckpointRef(run)
    assert parse_ref(f"{run}@production") == CheckpointRef(run, alias="production")
    assert parse_ref(f"{run}@latest") == CheckpointRef(run)
    assert parse_ref(f"{run}/steps/300") == CheckpointRef(run, step=300)
    assert parse_ref(tmp_path / "run").run.local_path == str(tmp_path / "run")
    assert parse_ref("/home/a@b/run").run.local_path == "/home/a@b/run"


@pytest.mark.parametrize(
    "text",
    [
        "gs://my-bucket/run@",
        "gs://my-bucket/run@123",
        "gs://my-bucket/run@a b",
        "gs://my-bucket/run/steps/007",
        "gs://my-bucket/run/steps/-1",
        "gs://my-bucket/run/steps/x",
        "gs://my-bucket/run/steps/3@production",
        "gs://my-bucket/run/steps/9999999999999999999",
    ],
)
def test_malformed_references_are_refused(text):
    with pytest.raises(InvalidURIError):
        parse_ref(text)
