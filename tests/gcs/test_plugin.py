"""The fixtures: one port for the session, a bucket for each test, an environment for clients."""

import os
import urllib.request


def test_environment_names_the_port_of_the_running_server(gcs):
    assert os.environ["STORAGE_EMULATOR_HOST"] == gcs.server.url
    assert os.environ["TENSORSTORE_GCS_HTTP_URL"] == gcs.server.url
    with urllib.request.urlopen(f"{gcs.server.url}/storage/v1/b/{gcs.bucket}") as answer:
        assert answer.status == 200


def test_each_test_gets_an_empty_bucket_of_its_own_first(gcs):
    assert gcs.names() == []
    assert gcs.bucket_uri.startswith("gs://test-")
    gcs.server.store.bucket(gcs.bucket).stage().discard()
