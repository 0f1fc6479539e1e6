"""What MkDocs does for this site beside its own work: pages that lie elsewhere, and Markdown as GitHub reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Written once, for readers of the repository; part of the site under names of its own.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "speeds.md",
}
FILES = ("LICENSE", "slurm/cli_filter.lua", "docs/skills/llmlaunch/SKILL.md")
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_ITEM = re.compile(r"\s*(?:[-*] |\d+\. )")


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/ and is linked from there."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for source in FILES:
        files.append(File.generated(config, f"files/{Path(source).name}.txt", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mend links to what has moved, and write lists and tables apart from the line above, which GitHub does not ask."""
    sources = {name: source for source, name in PAGES.items()}
    source = ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    up = "../" * page.file.src_uri.count("/")
    return _apart(_LINK.sub(lambda link: link[1] + up + _on_site(source, link[2]) + link[3], markdown))


def _on_site(source: Path, target: str) -> str:
    path = (source.parent / target).resolve()
    if not path.is_relative_to(ROOT):
        return target
    within = path.relative_to(ROOT).as_posix()
    if within in FILES:
        return f"files/{path.name}.txt"
    return PAGES.get(within, within.removeprefix("docs/"))


def _apart(markdown: str) -> str:
    lines: list[str] = []
    fenced = False
    block = ""  # first line of the list, table or paragraph that goes on
    for line in markdown.split("\n"):
        if line.startswith("```"):
            fenced, block = not fenced, ""
            lines += ["", line] if fenced else [line, ""]
            continue
        if not fenced:
            if line.startswith("<!--") and line.endswith("-->"):
                continue  # for our scripts and tests
            if not line.strip() or line.startswith("#"):
                block = ""
            elif not block:
                block = line
            elif (_ITEM.match(line) and not _ITEM.match(block)) or (line.startswith("|") and not block.startswith("|")):
                lines.append("")
                block = line
        lines.append(line)
    return "\n".join(lines)
