"""The documents against the project: links, commands, options, counters and test names exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata import cli_docs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tests/*.md", "examples/**/*.md", "bench/**/*.md")
    for path in ROOT.glob(pattern)
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
COMMANDS = dict(cli_docs.commands())


def test_cli_page_is_what_the_commands_say():
    page = (ROOT / "docs/cli.md").read_text()
    assert page == cli_docs.render(), "run `make docs`"


def test_a_change_of_a_command_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(COMMANDS["kvstrata doctor"], "help", "Something else.")
    monkeypatch.setattr(cli_docs, "commands", lambda: iter(COMMANDS.items()))
    assert "Something else." in cli_docs.render()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page if not file else (page.parent / file).resolve()
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def shell_commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) for every line of every shell block and every command in a table."""
    for page, name in zip(PAGES, IDS, strict=True):
        text = page.read_text()
        for block in re.findall(r"```(?:bash|shell)\n(.*?)```", text, re.DOTALL):
            for command in split_block(block):
                yield name, command
        for command in re.findall(r"`((?:make|pytest|kvstrata) [^`]+)`", text):
            yield name, command


def split_block(block: str) -> Iterator[str]:
    """Split into commands: a line that ends inside a quotation or with a backslash goes on."""
    pending = ""
    for line in block.splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending)
        except ValueError:
            continue
        if not line.endswith("\\") and pending.strip():
            yield pending.strip()
            pending = ""
    assert not pending.strip(), f"a command that does not end: {pending}"


@pytest.mark.parametrize(("page", "command"), sorted(set(shell_commands())))
def test_commands_exist(page: str, command: str):
    words = shlex.split(command.replace("\\\n", " "))
    while re.match(r"[A-Z_]+=", words[0]):  # a variable of the environment for this command
        del words[0]
    program = Path(words[0]).name
    if program == "make":
        targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        assert set(named) <= targets, f"{page}: no target {named} in the Makefile"
    elif program == "kvstrata":
        check_kvstrata_command(words)
    elif program == "python" and words[1] == "-m":
        check_module(words[2])
    elif program == "python":
        assert (ROOT / words[1]).is_file() or (ROOT / page).parent.joinpath(words[1]).is_file()
    elif program == "pytest":
        paths = [word for word in words[1:] if word.startswith("tests")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)
        for expression in [words[words.index("-k") + 1]] if "-k" in words else []:
            for keyword in re.split(r" (?:or|and) (?:not )?", expression):
                names = [file.name for path in paths for file in (ROOT / path).rglob("test_*.py")]
                assert any(keyword in name for name in names), f"{page}: -k {keyword} selects nothing"
    elif program.startswith("--"):
        pass  # a fragment of a command line; the configuration page has its own test
    else:
        assert program in {"curl", "git", "rm", "pip"}, f"{page}: do not know how to check {command!r}"


def check_kvstrata_command(words: list[str]) -> None:
    known = [path for path in COMMANDS if words[1:] and " ".join(["kvstrata", *words[1:]]).startswith(path)]
    groups = {" ".join(path.split()[:depth]) for path in COMMANDS for depth in (1, 2)}
    spoken = " ".join(["kvstrata", *(word for word in words[1:] if not word.startswith("-"))])
    assert known or spoken in groups, f"no such command: {words}"
    options = {option for path in known for parameter in COMMANDS[path].params for option in parameter.opts}
    # One with a space in it is a text for vLLM, given to an option.
    named = {word for word in words if word.startswith("--") and " " not in word}
    assert named <= options | {"--help", "--version"}


def check_module(module: str) -> None:
    if module.startswith("kvstrata."):
        assert (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").is_file()
    else:
        assert module == "vllm.entrypoints.openai.api_server"  # run by the end-to-end tests


def test_every_counter_is_documented():
    sources = ("stats.py", "remote_stats.py")  # importing them would import vLLM
    tables = "".join((ROOT / "src/kvstrata/vllm" / name).read_text() for name in sources)
    series = re.findall(r"^ +\w+ \| (\w+) \| ", tables, re.MULTILINE)
    names = {f"vllm:kvstrata_{name}" for name in series}
    documented = set(
        re.findall(r"^\| `(vllm:kvstrata_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    )
    assert names, "the counters have moved: mend this test"
    assert documented == names


def test_every_invariant_names_tests_that_exist():
    rows = re.findall(
        r"^\| ([A-Z]\d) \|.*\| (.*) \|$", (ROOT / "docs/invariants.md").read_text(), re.MULTILINE
    )
    wanted = [
        f"{letter}{n}"
        for letter, last in (("M", 5), ("R", 5), ("P", 7), ("A", 3))
        for n in range(1, last + 1)
    ]
    assert [number for number, _ in rows] == wanted
    for number, tests in rows:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, f"{number} has no test"
        for test in named:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{number}: {file}"
            assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{number}: {test}"


def test_the_makefile_explains_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", text, re.MULTILINE))
    explained = set(re.findall(r"^([a-z0-9-]+):.*?## \S", text, re.MULTILINE))
    assert targets == explained


def test_constraints_name_no_place_of_their_own():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.\-]+==[\w.]+", line), line


FORBIDDEN = re.compile(r"/work/|/root/|\bTODO\b|\bFIXME\b")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_pages_name_no_machine_and_no_leftovers(page: Path):
    assert FORBIDDEN.findall(page.read_text()) == []
