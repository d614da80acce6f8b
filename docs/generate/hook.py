"""What mkdocs asks while it builds the site: the navigation, the pages that are made of the code, and links to sources.

docs/README.md is the list of pages and the navigation. A link from a page to a file outside docs/ works on a code host
as it stands; in the site it leads to a page that shows the file.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

import api
import command_line
import configuration
import events
import metrics
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = "sources"
"""The folder of the site with the files that pages link to."""
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: the sections of docs/README.md, and the generated pages in that of the reference."""
    config.nav = [{"Home": "README.md"}, *navigation((DOCS / "README.md").read_text("utf-8"))]
    return config


def navigation(text: str) -> list[dict[str, Any]]:
    """The sections of a list of pages, those of level 3 inside those of level 2, each with its links.

    A page is in the first section that lists it, and in no other.
    """
    places = set[str]()
    sections: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for line in text.splitlines():
        if heading := re.match(r"(##|###) (.*)", line):
            entries = []
            if heading[1] == "##":
                sections.append({heading[2]: entries})
            else:
                next(iter(sections[-1].values())).append({heading[2]: entries})
        elif (link := re.match(r"- \[(.*?)\]\(([^)#:]+\.(?:md|ipynb))(?:#[^)]*)?\)", line)) and sections:
            place = _place(DOCS / link[2])
            if place not in places:
                entries.append({link[1].replace("`", ""): place})
            places.add(place)
    made: list[dict[str, Any]] = [{title: path} for title, path, _ in MADE]
    rooms = {"Python API": [api.INDEX, *({room: api.page_of(room)} for room in api.rooms())]}
    for section in sections:
        if "Reference" in section:
            section["Reference"] = [*made, *section["Reference"], rooms]
        if "Explanation" in section:
            section["Explanation"].append(
                {"Decisions": [{_title(path): f"decisions/{path.name}"} for path in _decisions()]}
            )
    return [section for section in sections if next(iter(section.values()))]


MADE = (
    ("Configuration", configuration.CONFIGURATION, "look up a table or key of a configuration file."),
    ("Keys of each algorithm", configuration.ALGORITHMS, "see which keys a script takes, with their defaults."),
    ("Options of each backend", configuration.BACKENDS, "see which options and axes a backend knows."),
    ("Command line", command_line.PAGE, "look up a command, its arguments and its options."),
    ("Metrics", metrics.PAGE, "look up what a number means, and its unit."),
    ("Events", events.PAGE, "look up what a run writes to `events.jsonl`."),
)
"""The pages of the reference that are made of the code: title, path, and what a reader does there."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are made of the code, and those that show files of the repository."""
    made = {**configuration.pages(), **command_line.pages(), **api.pages(), **metrics.pages(), **events.pages()}
    lessons = {path.relative_to(DOCS).as_posix(): path for path in sorted((DOCS / notebooks.FOLDER).glob("*.ipynb"))}
    for name, path in lessons.items():
        page = f"{name.removesuffix('.ipynb')}.md"
        made[page] = _relinked(notebooks.markdown(path), path, page)
    written = [DOCS / file.src_uri for file in files if file.src_uri.endswith(".md")]
    asked = [path for page in (*written, *lessons.values()) for path in _outside(page)]
    while asked:
        path = asked.pop()
        if (page := _page_of(path)) not in made:
            made[page] = _shown(path)
            asked += _outside(path) if path.suffix == ".md" else []
    for page, text in {**made, "llms.txt": _for_programs(config)}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 -- mkdocs'
    """A page whose links to files outside docs/ lead to the pages that show them."""
    path = DOCS / page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
        markdown = _with_made(markdown)
    return _relinked(markdown, path, page.file.src_uri) if path.is_file() else markdown


def _with_made(text: str) -> str:
    """The list of pages, with those that are made of the code."""
    listed = (*MADE, ("Python API", api.INDEX, "look up a public name, its signature and its errors."))
    made = "".join(f"- [{title}]({place}): {use}\n" for title, place, use in listed)
    return re.sub(r"<!-- made -->.*?<!-- /made -->\n\n", lambda _: made, text, flags=re.DOTALL)


def _for_programs(config: MkDocsConfig) -> str:
    """The list of pages for programs that read the site, in the form of https://llmstxt.org."""
    readme = DOCS / "README.md"
    text = _relinked(_with_made(readme.read_text("utf-8")), readme, "llms.txt")
    lines = [line for line in text.splitlines() if line.startswith(("- [", "##"))]
    listed = re.sub(r"(^|\n)##+", r"\n##", "\n".join(lines))
    return f"# {config.site_name}\n\n> {config.site_description}\n{re.sub(r'[.]md(?=[)#])', '.html', listed)}\n"


def _outside(page: Path) -> list[Path]:
    """The files and folders outside docs/ that a page links to."""
    found = ((page.parent / link["path"]).resolve() for link in _LINK.finditer(page.read_text("utf-8")))
    return [path for path in found if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)]


def _place(path: Path) -> str:
    """Where the site has a file or folder of the repository."""
    path = path.resolve()
    if path.suffix == ".ipynb":
        path = path.with_suffix(".md")
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else _page_of(path)


def _page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix().removesuffix(".md")
    return f"{SOURCES}/{name.replace('README', 'readme')}.md"  # the theme hides a README behind its section's title


def _relinked(text: str, path: Path, page: str) -> str:
    """A page's text, whose links are of the site and not of the repository. Others, such as broken ones, stay."""

    def of_the_site(link: re.Match[str]) -> str:
        target = (path.parent / link["path"]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return link["path"]
        return posixpath.relpath(_place(target), posixpath.dirname(page))

    return _LINK.sub(of_the_site, text)


def _shown(path: Path) -> str:
    """A file or a folder of the repository as a page."""
    name = path.relative_to(ROOT).as_posix()
    unfound = "---\nsearch: {exclude: true}\n---\n\n"  # who searches wants the pages that explain a word
    if path.is_dir():
        inside = [each.name for each in sorted(path.iterdir()) if each.name[0] not in "._"]
        return f"{unfound}# {name}/\n\n" + "".join(f"- `{each}`\n" for each in inside)
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return _relinked(text, path, _page_of(path))
    return f"{unfound}# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def _decisions() -> list[Path]:
    return sorted((DOCS / "decisions").glob("*.md"))


def _title(path: Path) -> str:
    return path.read_text("utf-8").partition("\n")[0].removeprefix("# ").replace("`", "")
