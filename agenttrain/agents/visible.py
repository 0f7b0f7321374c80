"""The files of this machine that an agent's program can read in its sandbox.

That is the software that the program consists of, the folder in which the run was started, and
`agent.read`. The home is an empty folder of the agent's own::

    /home/ada                                 empty, and the agent's
    /home/ada/.nvm/versions/node/v22          read-only: has the program, bin/my-agent
    /home/ada/project                         read-only: the run was started here
    /home/ada/project/.env, /home/ada/.ssh    absent
"""

from __future__ import annotations

import os
import pwd
import shutil
import site
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from agenttrain.tools.sandbox.root import PROGRAMS, is_within
from agenttrain.utils.files import PACKAGE

SECRETS = (
    *(".ssh", ".aws", ".azure", ".gnupg", ".password-store", ".local/share/keyrings"),
    *(".netrc", "_netrc", ".git-credentials", ".config/git/credentials", ".config/agenttrain"),
    *(".config/gh", ".config/hub", ".config/gcloud", ".config/rclone", ".config/wandb"),
    *(".config/sops", ".config/pip", ".pip/pip.conf", ".config/pypoetry/auth.toml", ".pypirc"),
    *(".npmrc", ".yarnrc", ".yarnrc.yml", ".cargo/credentials", ".cargo/credentials.toml"),
    *(".gem/credentials", ".m2/settings.xml", ".gradle/gradle.properties", ".docker/config.json"),
    *(".kube/config", ".terraform.d/credentials.tfrc.json", ".vault-token", ".boto", ".s3cfg"),
    *(".kaggle", ".config/kaggle", ".huggingface", ".cache/huggingface/token", ".pgpass"),
    *(".cache/huggingface/stored_tokens", ".my.cnf", ".env", ".envrc", ".config/github-copilot"),
    *(".claude.json", ".claude/.credentials.json", ".claude/history.jsonl", ".claude/projects"),
    *(".codex/auth.json", ".codex/history.jsonl", ".codex/sessions", ".gemini/oauth_creds.json"),
    *(".mozilla", ".config/google-chrome", ".config/chromium", ".thunderbird"),
    *(".bash_history", ".zsh_history", ".histfile", ".history", ".local/share/fish"),
    *(".python_history", ".node_repl_history", ".psql_history", ".mysql_history"),
    *(".sqlite_history", ".rediscli_history", ".lesshst", ".viminfo", ".wget-hsts"),
    *(".modal.toml", ".anthropic", ".openai", ".config/openai", ".ngc"),
)
"""Keys, tokens and histories, below a home. They are hidden at the top of other folders too."""
SECRET_VARIABLES = (
    *("AGENTTRAIN_KEY", "NETRC", "HISTFILE", "HF_TOKEN_PATH", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "KUBECONFIG", "PGPASSFILE"),
    *("NPM_CONFIG_USERCONFIG", "PIP_CONFIG_FILE", "GNUPGHOME", "PASSWORD_STORE_DIR"),
)
"""Environment variables that name a file or folder with secrets."""
SOFTWARE_VARIABLES = (
    *("PYTHONPATH", "NODE_PATH", "LD_LIBRARY_PATH", "JAVA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables that agents get, with folders or files of software in them."""
SYSTEM = (
    *("/", "/home", "/root", "/tmp", "/var", "/var/tmp", "/etc", "/proc", "/sys", "/dev"),
    *("/dev/shm", "/run", "/var/run", "/opt", "/srv", "/mnt", "/media", *PROGRAMS),
)
"""Folders that are not shown as a whole, because they are not of one program or project. PROGRAMS
are /usr and the like, which every sandbox has."""
BINARIES = ("bin", "sbin", "shims", "libexec")
"""Names of folders of programs, within the folder of an installation."""
PARTS = (*BINARIES, "lib", "lib64", "pyvenv.cfg")
"""Parts of an installation that are shown where its folder holds other things too, as a home."""
MAX_HOPS = 40
"""Links and interpreters between the name of a program and the program, at most."""


@dataclass(slots=True)
class Visible:
    """Files and folders that a sandbox shows.

    `visible_files` makes it and fills it by the `add` methods, which follow symbolic links.
    """

    home: str
    """The user's home. In the sandbox an empty folder of the agent's own has this path."""
    work: str
    """Folder in which its program starts."""
    programs: set[str] = field(default_factory=set)
    """Single files, and folders of our own software, in which nothing is hidden."""
    shown: set[str] = field(default_factory=set)
    """Folders that are shown but for the paths in `hidden`."""
    hidden: set[str] = field(default_factory=set)
    """Files and folders of keys, tokens and histories."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic link on the way to a path above -> its target."""

    def add(self, path: str) -> None:
        """Show a file or a folder. A folder that may not be shown whole is left out."""
        real = resolve_links(path, self.links)
        if os.path.isdir(real) and self._may_show_whole(real):
            self.shown.add(real)
        elif os.path.isfile(real) and not is_within(real, *PROGRAMS):
            self.programs.add(real)

    def add_with_folder(self, file: str) -> None:
        """Show a file with its folder, or alone if the folder may not be shown."""
        real = resolve_links(file, self.links)
        folder = os.path.dirname(real)
        self.add(folder if self._may_show_whole(folder) else real)

    def add_program(self, path: str) -> None:
        """Show a program with the installation that it belongs to.

        Example: for ``/home/ada/.nvm/versions/node/v22/bin/node`` that is the folder ``v22``, and
        for ``…/v22/lib/node_modules/my-agent/cli.js`` the folder ``node_modules``.
        """
        parts, folder = path.split("/"), os.path.dirname(path)
        if "node_modules" in parts:
            node_modules = "/".join(parts[: parts.index("node_modules") + 1])
            self.add_software(node_modules, folders=self.shown)
        elif os.path.basename(folder) in BINARIES:
            self.add_software(os.path.dirname(folder), folders=self.shown)
        else:
            self.add_with_folder(path)
        # The file too: an installation may be shown in parts, and a link has a target elsewhere.
        self.add(path)

    def add_software(self, installation: str, *, folders: set[str]) -> None:
        """Show an installation, e.g. ``/opt/node-22``: its folder is added to `folders`.

        `folders` is `programs` or `shown`. Where the folder may not be shown whole, as a home with
        a ``bin``, it is only the PARTS of an installation in it: ``bin``, ``lib``, ``pyvenv.cfg``…
        """
        real = resolve_links(installation, self.links)
        # ~/.local is an installation with the user's data in it, in share.
        if self._may_show_whole(real) and os.path.basename(real) != ".local":
            folders.add(real)
            return
        for part in PARTS:
            path = resolve_links(f"{real}/{part}", self.links)
            if os.path.isdir(path) and self._may_show_whole(path):
                folders.add(path)
            elif os.path.isfile(path):
                self.programs.add(path)  # `shown` has only folders

    def _may_show_whole(self, folder: str) -> bool:
        """Return True unless a folder is the system's, the home, or above the home."""
        is_system = folder in SYSTEM or is_within(folder, *PROGRAMS, "/proc", "/sys", "/dev")
        return not is_system and not is_within(self.home, folder)


def visible_files(command: Sequence[str], read: Sequence[str]) -> Visible:
    """Return the files that a command's program can read in its sandbox.

    `read` is the setting `agent.read`. Raises ValueError for a path in it that cannot be shown.
    """
    work, links = os.getcwd(), dict[str, str]()
    home = _home_folders()[0]  # $HOME, where it is usable
    visible = Visible(home=resolve_links(home, links), work=work, links=links)
    secrets = _secret_paths()
    for path in read:
        if problem := _read_problem(path, visible, secrets):
            raise ValueError(f"agent.read: {path}: {problem}")
    _add_software(visible, command)
    _add_named_files(visible, command, secrets)
    visible.add(work)
    for path in read:
        visible.add(os.path.expanduser(path))
    visible.shown = {path for path in visible.shown if not is_within(path, *secrets)}
    if not is_within(work, *visible.shown):
        visible.work = visible.home
    # The names of SECRETS, such as .env, are secret in a project too: at the top of each folder.
    secrets |= _with_targets({f"{folder}/{name}" for folder in visible.shown for name in SECRETS})
    # Hiding a folder hides all that is in it. One that holds a program or a shown folder is not
    # hidden, because the agent needs these.
    readable = (*visible.programs, *visible.shown)
    visible.hidden = {s for s in secrets if not any(is_within(path, s) for path in readable)}
    return visible


def _add_software(visible: Visible, command: Sequence[str]) -> None:
    """Show Python and this package, the environment's software, and the command's programs."""
    for installation in (sys.prefix, sys.base_prefix, str(PACKAGE)):
        visible.add_software(installation, folders=visible.programs)
    visible.add(sys.executable)
    for path in _software_of_environment():
        visible.add(path)
    for program in _named_programs(command, visible.links):
        visible.add_program(program)


def _add_named_files(visible: Visible, command: Sequence[str], secrets: set[str]) -> None:
    """Show the files and folders that a command's words name, unless they are secret."""
    for path in _named_paths(command):
        if is_within(os.path.realpath(path), *secrets):
            continue
        if os.path.isdir(path):
            visible.add(path)
        else:  # a script may read the files beside it
            visible.add_with_folder(path)


def resolve_links(path: str, links: dict[str, str]) -> str:
    """Resolve a path's symbolic links, and add each of them to `links`. Return the real path."""
    parts, real, hops = os.path.abspath(path).split("/"), "", 0
    while parts:
        part, *parts = parts
        if part == "..":  # of a link's target
            real = os.path.dirname(real)
        elif part not in ("", "."):
            step = f"{real}/{part}"
            if not os.path.islink(step) or hops == MAX_HOPS:  # MAX_HOPS links are a loop
                real = step
                continue
            hops += 1
            links[step] = os.readlink(step)
            parts = [*links[step].split("/"), *parts]
            if links[step].startswith("/"):  # an absolute target begins at the root
                real = ""
    return real or "/"


def _read_problem(path: str, visible: Visible, secrets: set[str]) -> str | None:
    """Return why an entry of `agent.read` cannot be shown, or None if it can."""
    real = os.path.realpath(os.path.expanduser(path))
    if not os.path.exists(real):
        return "there is no such file or folder; name one that exists"
    if is_within(real, *secrets):
        return "has keys, tokens or histories, which an agent must not read; name another folder"
    if os.path.isdir(real) and is_within(visible.home, real):
        return "has your home in it, with its keys and histories; name folders within the home"
    if real in SYSTEM or is_within(real, "/proc", "/sys", "/dev"):
        return "is the system's; name folders of yours"
    return None


def _home_folders() -> list[str]:
    """Return $HOME and the home of the password database, or /home/user if neither is usable."""
    passwd_home = ""
    with suppress(KeyError):
        passwd_home = pwd.getpwuid(os.getuid()).pw_dir
    homes = [os.environ.get("HOME", ""), passwd_home]
    return [path for path in homes if path.startswith("/") and path.strip("/")] or ["/home/user"]


def _secret_paths() -> set[str]:
    """Return this user's files and folders of keys, tokens and histories, with links' targets."""
    paths = {f"{home}/{name}" for home in _home_folders() for name in SECRETS}
    paths |= {os.environ[name] for name in SECRET_VARIABLES if os.environ.get(name)}
    if config_home := os.environ.get("XDG_CONFIG_HOME"):
        names = (name for name in SECRETS if name.startswith(".config/"))
        paths |= {f"{config_home}/{name.removeprefix('.config/')}" for name in names}
    if hf_home := os.environ.get("HF_HOME"):
        paths |= {f"{hf_home}/token", f"{hf_home}/stored_tokens"}
    return _with_targets(paths)


def _with_targets(paths: set[str]) -> set[str]:
    """Return the paths that exist. A symbolic link is returned itself, and so is its target."""
    existing = [os.path.abspath(path) for path in paths if os.path.lexists(path)]
    # A virtual environment may have the name .env.
    existing = [p for p in existing if not (p.endswith("/.env") and os.path.isdir(p))]
    # The links of the folders are resolved, and a link at the end of a path is not.
    unfollowed = {f"{os.path.realpath(os.path.dirname(p))}/{os.path.basename(p)}" for p in existing}
    return unfollowed | {os.path.realpath(path) for path in existing}


def _software_of_environment() -> Iterator[str]:
    """Yield the files and folders of software that the agent's environment names."""
    for name in SOFTWARE_VARIABLES:
        yield from filter(None, os.environ.get(name, "").split(os.pathsep))
    if site.ENABLE_USER_SITE:
        yield site.getusersitepackages()


def _named_paths(command: Sequence[str]) -> Iterator[str]:
    """Yield the files and folders that a command's words name, also as ``--option=path``."""
    for word in command:
        for path in (word, word.partition("=")[2]):
            if path and os.path.exists(path):
                yield path


def _named_programs(command: Sequence[str], links: dict[str, str]) -> Iterator[str]:
    """Yield the programs that a command names, and the interpreters of those that are scripts.

    A program that is a symbolic link is yielded, and so is its target. The links in the folders of
    their paths are resolved, and added to `links` (link -> target).
    """
    queue = [path for word in command if (path := shutil.which(word))]
    for _ in range(MAX_HOPS):
        if not queue:
            return
        path = queue.pop()
        # Not `resolve_links(path)`: that would follow the program's own link before it is yielded.
        folder = resolve_links(os.path.dirname(os.path.abspath(path)), links)
        program = f"{folder}/{os.path.basename(path)}"
        yield program
        if os.path.islink(program):
            queue.append(os.path.join(folder, os.readlink(program)))
        elif os.path.isfile(program):  # reading a named pipe would wait for its writer
            queue += filter(None, map(shutil.which, _interpreters(program)))


def _interpreters(path: str) -> list[str]:
    """Return the programs that a script's first line names: ``#!/usr/bin/env -S node --x``."""
    try:
        with open(path, "rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    interpreter, *words = line[2:].decode("utf-8", "replace").split() or [""]
    if os.path.basename(interpreter) != "env":
        return [interpreter]
    # The first word of env that is neither an option nor a variable is its program.
    programs = [word for word in words if not word.startswith("-") and "=" not in word]
    return [interpreter, *programs[:1]]
