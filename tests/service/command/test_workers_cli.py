"""`cairn workers take-over`: what it refuses, and by whose name."""

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.workers import note_worker
from tests.service.commands import cairn_here
from tests.service.planes import running_plane


def test_a_worker_is_taken_over_by_name_once_it_is_dead(root, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with running_plane(root, folder) as (url, _):
        catalog = Catalog.open(f"sqlite:///{folder}/control-plane/catalog.sqlite")
        note_worker(catalog, "dead", version="0")
        catalog.close()
        unknown = cairn_here("workers", "take-over", "none", url=url)
        assert (unknown.returncode, unknown.stdout) == (3, "")
        assert "There is no worker 'none'." in unknown.stderr
        alive = cairn_here("workers", "take-over", "local", url=url)
        assert (alive.returncode, alive.stdout) == (4, "")
        assert "is alive. End its process first." in alive.stderr
        done = cairn_here("workers", "take-over", "dead", url=url)
        assert (done.returncode, done.stdout) == (0, "")
        names = [line.split("\t")[0] for line in cairn_here("workers", url=url).stdout.splitlines()]
        assert names[1:] == ["local"]
