"""What a Dockerfile makes, without a container engine.

Its instructions are carried out one by one, in a folder that stands for the image's root: a path
such as `/opt/cairn` is one below that folder. Programs get the image's own environment and no
other, and run as its user; of this machine they see the system and the interpreter, which stand for
the base image.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import dockerfile

OWNED: Final = re.compile(r"(?<![\w./-])/(?=(?:src|opt/cairn|var/lib/cairn)\b)")
"""Where a path begins that the image has to itself."""

REGISTRY: Final = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that say how packages are reached from here; a builder has its own."""

VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class Image:
    """A stage, as far as it is carried out.

    Attributes:
        root: The folder that stands for `/`.
        variables: Of ENV.
        arguments: Of ARG.
        labels: Of LABEL.
        folder: Where programs begin (WORKDIR).
        user: Who runs them, as UID:GID.
        entrypoint: Before every command.
        command: What the image runs by itself.
        health: The command of its HEALTHCHECK.
        ports: Of EXPOSE.
        volumes: Of VOLUME.
    """

    root: Path
    variables: Mapping[str, str]
    arguments: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def path(self, path: str) -> Path:
        """Where a path of the image is."""
        return self.root / os.path.normpath(os.path.join(self.folder, path)).lstrip("/")

    def local(self, text: str) -> str:
        """A text with the image's paths as they are here."""
        return OWNED.sub(f"{self.root}/", text)

    def environment(self, **more: str) -> dict[str, str]:
        """What a program of this image finds in its environment."""
        return {name: self.local(value) for name, value in {**self.variables, **more}.items()}

    def start(
        self, arguments: Iterable[str], variables: Mapping[str, str], output: Any
    ) -> subprocess.Popen[str]:
        """Run a program as the image does: its environment, its user, its folder.

        Args:
            arguments: Its command line.
            variables: Beside those of the image.
            output: Where it writes: `subprocess.PIPE`, or a file.
        """
        environment = self.environment(**variables)
        words = [self.local(word) for word in arguments]
        program = shutil.which(words[0], path=environment["PATH"])
        assert program is not None, f"{words[0]}: not on the image's PATH, {environment['PATH']}"
        identity: dict[str, Any] = {}
        if os.getuid() == 0 and self.user != "0:0":
            uid, gid = map(int, self.user.split(":"))
            identity = {"user": uid, "group": gid, "extra_groups": []}
        return subprocess.Popen(
            [program, *words[1:]],
            env=environment,
            cwd=self.path("."),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            **identity,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of it to its end."""
        process = self.start(arguments, variables, subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


class Build:
    """Carries a Dockerfile out.

    Args:
        file: The Dockerfile; its folder is the context, as far as .dockerignore lets it in.
        folder: An empty folder that everybody may enter.
        base: Where the base image's interpreter is (`make_base`).
    """

    def __init__(self, file: Path, folder: Path, base: Path) -> None:
        self._lines = dockerfile.parse_file(str(file))
        self._folder = folder
        self._context = folder / "context"
        copy_context(file.parent, self._context)
        self._base = base
        self._stages: dict[str, Image] = {}
        self._global: dict[str, str] = {}

    def run(self) -> dict[str, Image]:
        """Every stage by its name."""
        image: Image | None = None
        for line in self._lines:
            if line.cmd.upper() == "FROM":
                image = self._begin(image, line)
            elif image is None:
                assert line.cmd.upper() == "ARG", line.original
                self._global.update([line.value[0].split("=", 1)])
            else:
                image = self._carry_out(image, line)
                self._stages[self._name] = image
        return self._stages

    def _begin(self, before: Image | None, line: Any) -> Image:
        base, _, name = (_filled(word, self._global) for word in line.value)
        self._name = name
        self._shared = base in self._stages
        if self._shared:
            return self._stages[base]
        root = self._folder / "root"
        if before is not None:
            # Every stage has the same paths, so one is moved away before the next begins.
            moved = before.root.rename(self._folder / "stages")
            self._stages = {n: replace(one, root=moved) for n, one in self._stages.items()}
        root.mkdir()
        root.chmod(0o755)
        # An interpreter that was built elsewhere may look for its library there first.
        variables = {
            "PATH": f"{self._base}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(self._base.parent / "lib"),
        }
        return Image(root=root, variables=variables, arguments={})

    def _carry_out(self, image: Image, line: Any) -> Image:
        known = {**image.arguments, **image.variables}
        value = [_filled(word, known) for word in line.value]
        if self._shared and line.cmd.upper() in ("COPY", "RUN"):
            raise NotImplementedError(f"{line.original}: files of a stage that others begin with")
        match line.cmd.upper():
            case "ARG":
                name, _, default = value[0].partition("=")
                return replace(image, arguments={**image.arguments, name: default})
            case "ENV":
                return replace(image, variables={**image.variables, **_pairs(value)})
            case "LABEL":
                return replace(image, labels={**image.labels, **_pairs(value)})
            case "WORKDIR":
                image.path(value[0]).mkdir(parents=True, exist_ok=True)
                return replace(image, folder=value[0])
            case "COPY":
                self._copy(image, line.flags, value)
                return image
            case "RUN":
                self._execute(image, line)
                return image
            case "VOLUME":
                return replace(image, volumes=(*image.volumes, *value))
            case "EXPOSE":
                return replace(image, ports=(*image.ports, *value))
            case "USER":
                return replace(image, user=value[0])
            case "ENTRYPOINT" if line.json:
                return replace(image, entrypoint=tuple(line.value))
            case "CMD" if line.json:
                return replace(image, command=tuple(line.value))
            case "HEALTHCHECK" if line.json and value[0] == "CMD":
                return replace(image, health=tuple(line.value[1:]))
        raise NotImplementedError(f"line {line.start_line}: {line.original}")

    def _copy(self, image: Image, flags: Iterable[str], value: list[str]) -> None:
        options = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        stage = options.pop("from", None)
        assert not options, options
        *sources, target = value
        for source in sources:
            found = self._context / source if stage is None else self._stages[stage].path(source)
            into = image.path(target)
            if target.endswith("/"):
                into /= Path(source).name
            into.parent.mkdir(parents=True, exist_ok=True)
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, copy_function=os.link)
            else:
                shutil.copy(found, into)

    def _execute(self, image: Image, line: Any) -> None:
        (command,) = line.value
        registry = {
            name: value
            for name, value in os.environ.items()
            if name.upper().startswith(REGISTRY) and name not in image.variables
        }
        if os.getuid() != 0:
            command = command.replace("10001", str(os.getuid()), 1)
            command = command.replace("10001", str(os.getgid()), 1)
        words = ["/bin/sh", "-c", command]
        done = image.run(*words, **{**registry, "HOME": os.environ.get("HOME", "/")})
        assert done.returncode == 0, f"line {line.start_line}: {done.stdout}{done.stderr}"


def copy_context(source: Path, target: Path) -> None:
    """What .dockerignore lets into a build: it shuts everything out, then names what may come."""
    lines = (source / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    admitted = [line.removeprefix("!") for line in patterns if line.startswith("!")]
    refused = [line for line in patterns if not line.startswith("!")]
    assert refused == ["*", "**/__pycache__", "**/*.pyc"], refused
    target.mkdir()
    for name in admitted:
        if (source / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source / name, target / name)


def make_base(folder: Path) -> Path:
    """The interpreter of the base image: the one that runs this, with nothing but pip beside it.

    A copy where it lies in a folder that only root may enter; as it is compiled, since programs of
    the image keep nothing that they compile.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    source = Path(sys.base_prefix)
    for part in ("bin", "lib"):
        (folder / part).mkdir(parents=True)
    library = folder / "lib" / version
    ignored = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter")
    shutil.copytree(source / "lib" / version, library, ignore=ignored)
    for shared in (source / "lib").glob("libpython*.so*"):
        shutil.copy(shared, folder / "lib" / shared.name)
    shutil.copy(source / "bin" / version, folder / "bin" / "python")
    subprocess.run(
        [folder / "bin" / "python", "-m", "ensurepip"], check=True, capture_output=True, timeout=120
    )
    return folder / "bin"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], (word.strip('"') for word in words[1::2]), strict=True))


def _filled(word: str, known: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: known[found[1]], word)
