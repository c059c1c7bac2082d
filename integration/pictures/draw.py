#!/usr/bin/env python3
"""`make pictures`: the SVG files of docs/, from plain data, without a library.

  draw.py drawings FOLDER                               parts.svg, race.svg and stale-bind.svg
  draw.py terminal FILE [OPTION...] COMMAND...          runs each command on a terminal, and draws commands and output
    --columns N          the width of the terminal
    --replace OLD=NEW    replaces a path before the text is laid out
    --read               draws stdin, as the output of the one command

An image in a page cannot load a font, and browsers choose different ones. So each run of text has a fixed length.
The colours follow the reader's theme by prefers-color-scheme.
"""

import argparse
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import unicodedata
from xml.sax.saxutils import escape

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
# The width of a character, in parts of the font's size.
ADVANCE = 0.6

# The palette: class, colour in a light theme, colour in a dark theme.
COLOURS = [
    ("paper", "#ffffff", "#0d1117"),
    ("plain", "#1f2328", "#e6edf3"),
    ("quiet", "#59636e", "#9198a1"),
    ("red", "#cf222e", "#ff7b72"),
    ("green", "#1a7f37", "#56d364"),
    ("yellow", "#8a5a00", "#e3b341"),
    ("blue", "#0969da", "#79c0ff"),
    ("magenta", "#8250df", "#d2a8ff"),
    ("cyan", "#1b7c83", "#39c5cf"),
]
# The colours of SGR 30 to 37 and 90 to 97.
SGR = ["plain", "red", "green", "yellow", "blue", "magenta", "cyan", "plain"]


def style():
    """Text and lines of each colour, for both themes."""
    def rules(column):
        lines = []
        for colour in COLOURS:
            name, value = colour[0], colour[column]
            lines.append(f".{name} {{ fill: {value}; }} .{name}-line {{ stroke: {value}; }}")
        return "\n".join(lines)
    return (
        "<style>\ntext { white-space: pre; }\n.bold { font-weight: bold; }\n.dim { opacity: 0.65; }\n"
        f".box, .line {{ fill: none; stroke-width: 1.5; }}\n{rules(1)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{rules(2)}\n}}\n</style>\n"
    )


class Picture:
    """An SVG file in the making."""

    def __init__(self, width, height, title, size=13):
        self.width, self.height, self.size = width, height, size
        self.step = size * ADVANCE
        self.title = title
        self.parts = []

    def text(self, x, y, text, classes="plain"):
        """A run of text; two spaces stay two."""
        if not text.strip():
            return
        # A box drawing or an accent is one column, an ideograph two.
        columns = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
        end = x + columns * self.step
        if end > self.width:
            sys.exit(f"draw {self.title}: {text!r} ends at {end:.0f} of {self.width}")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{classes}" textLength="{columns * self.step:.1f}" xml:space="preserve">{escape(text)}</text>'
        )

    def box(self, x, y, width, height, lines=(), colour="quiet", dashed=False):
        """A box with lines of text: (text, classes) each, or a plain text."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="box {colour}-line"{dash}/>')
        for number, line in enumerate(lines):
            text, classes = (line, "plain") if isinstance(line, str) else line
            if len(text) * self.step > width - 20:
                sys.exit(f"draw {self.title}: {text!r} is longer than its box")
            self.text(x + 12, y + 22 + 19 * number, text, classes)

    def arrow(self, points, colour="quiet", dashed=False):
        """A line along the points; its end has a head."""
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" class="line {colour}-line"{dash} marker-end="url(#{colour}-end)"/>')

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="5" class="{colour}"/>')

    def line(self, x1, y1, x2, y2, colour="quiet", dashed=False):
        dash = ' stroke-dasharray="2 4"' if dashed else ""
        self.parts.append(f'<path d="M{x1},{y1} L{x2},{y2}" class="line {colour}-line"{dash}/>')

    def write(self, path, frame=False):
        heads = "".join(
            f'<marker id="{name}-end" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" class="{name}"/></marker>'
            for name, *_ in COLOURS if any(f"url(#{name}-end)" in part for part in self.parts)
        )
        edge = ' class="paper quiet-line" stroke-width="0.5"' if frame else ' class="paper"'
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
                f'height="{self.height:g}" role="img" aria-label="{escape(self.title)}" font-family="{FONT}" font-size="{self.size}">\n'
                f"<title>{escape(self.title)}</title>\n{style()}"
                f'<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="6"{edge}/>\n'
            )
            if heads:
                file.write(f"<defs>{heads}</defs>\n")
            file.write("\n".join(self.parts) + "\n</svg>\n")


# Drawings.

def parts(path):
    picture = Picture(900, 490, "The parts of bindguard on a node")
    own, others = "green", "quiet"
    name = "plain bold"
    picture.text(20, 30, "green: bindguard", "green")
    picture.text(190, 30, "grey: what the node has anyway", "quiet")

    picture.box(20, 60, 150, 70, [("containerd", name), ("for each create", "quiet")], others)
    picture.box(20, 170, 150, 70, [("Docker, Podman,", name), ("CRI-O", name)], others)
    picture.box(235, 60, 190, 70, [("shim", name), "containerd-shim-", "bindguard-v2"], own)
    picture.box(490, 60, 190, 180, [("wrapper", name), "bindguard-runtime"], own)
    picture.box(503, 120, 164, 108, [("guard", name), "checks each bind,", "repairs, becomes", "runc by execve"], own)
    picture.box(745, 60, 135, 70, [("runc", name), "crun, youki"], others)
    picture.box(745, 170, 135, 70, [("container", name), ("its own mounts", "quiet")], others)

    picture.arrow([(170, 95), (232, 95)], others)
    picture.arrow([(425, 95), (487, 95)], own)
    picture.arrow([(680, 95), (742, 95)], own)
    picture.arrow([(812, 130), (812, 167)], others)
    picture.arrow([(170, 205), (487, 205)], others)
    picture.text(205, 198, "as their OCI runtime", "quiet")

    picture.box(235, 290, 445, 36, ["the kubelet's volumes, and the node's mounts"], others)
    picture.arrow([(585, 228), (585, 287)], own)
    picture.text(595, 268, "reads, re-binds", "green")

    picture.box(235, 388, 190, 70, [("agent", name), "bindguard-agent"], own)
    picture.box(490, 388, 190, 70, [("operator's commands", name), "bindguard diagnose,", "repair, doctor ..."], own)
    picture.arrow([(330, 388), (330, 329)], own)
    picture.text(340, 362, "re-binds after an update", "green")
    picture.arrow([(585, 388), (585, 329)], own)
    picture.text(595, 362, "read, repair", "green")
    picture.arrow([(330, 458), (330, 476), (812, 476), (812, 243)], own)
    picture.text(700, 430, "refreshes,", "green")
    picture.text(700, 449, "if opted in", "green")
    picture.arrow([(95, 130), (95, 150), (200, 150), (200, 423), (232, 423)], others, dashed=True)
    picture.text(52, 400, "NRI, if turned on", "quiet")
    picture.write(path)


def race(path):
    picture = Picture(900, 438, "The race between the kubelet's update and the runtime's mount")
    times = [(250, "1"), (470, "2"), (690, "3")]
    for x, number in times:
        picture.line(x, 52, x, 425, dashed=True)
        picture.text(x - 3, 30, number, "plain bold")
    picture.arrow([(170, 42), (880, 42)])
    picture.text(836, 30, "time", "quiet")

    picture.text(20, 84, "kubelet", "plain bold")
    picture.dot(250, 80, "blue")
    picture.text(262, 84, "binds app.conf for", "plain")
    picture.text(262, 103, "the subPath", "plain")
    picture.dot(470, 80, "blue")
    picture.text(482, 84, "writes version 2 and", "plain")
    picture.text(482, 103, "deletes version 1", "plain")

    picture.text(20, 160, "volume", "plain bold")
    picture.box(250, 140, 220, 36, [("app.conf  version 1", "plain")])
    picture.box(470, 140, 410, 36, [("app.conf  version 2", "plain")])

    picture.text(20, 224, "subPath's bind", "plain bold")
    picture.box(250, 204, 220, 36, [("version 1", "plain")])
    picture.box(470, 204, 220, 36, [("version 1//deleted", "red")], "red", dashed=True)

    picture.text(20, 298, "without", "plain bold")
    picture.text(20, 317, "bindguard", "plain bold")
    picture.dot(690, 294, "red")
    picture.text(702, 298, "runc mounts it:", "red")
    picture.text(702, 317, "no such file", "red")
    picture.text(702, 336, "or directory", "red")

    picture.text(20, 382, "with", "plain bold")
    picture.text(20, 401, "bindguard", "plain bold")
    picture.dot(590, 378, "green")
    picture.text(482, 401, "the guard re-binds", "green")
    picture.text(482, 420, "the path to version 2", "green")
    picture.arrow([(590, 378), (682, 378)], "green")
    picture.dot(690, 378, "green")
    picture.text(702, 382, "runc mounts", "green")
    picture.text(702, 401, "version 2", "green")
    picture.write(path)


def stale_bind(path):
    picture = Picture(860, 308, "A subPath bind before and after the re-bind")
    picture.text(20, 30, "ConfigMap volume on the node", "plain bold")
    picture.box(20, 44, 330, 54, [("..2026_11_21_05_10/  (deleted)", "red"), ('  app.conf   "version 1"', "red")], "red", dashed=True)
    picture.box(20, 150, 330, 54, ["..2026_11_22_09_30/  <- ..data", '  app.conf   "version 2"'])
    picture.text(510, 30, "bind mount of the subPath", "plain bold")
    picture.box(510, 44, 330, 160, [
        "volume-subpaths/conf/app/0", "",
        ("before: app.conf//deleted", "red"), ('runc: "no such file or directory"', "red"), "",
        ("after the re-bind: current app.conf", "green"), ("the container starts", "green"),
    ])
    picture.arrow([(510, 102), (440, 102), (400, 72), (354, 72)], "red", dashed=True)
    picture.arrow([(510, 160), (440, 160), (400, 178), (354, 178)], "green")
    picture.text(416, 150, "re-bind", "green")
    for number, line in enumerate([
        "1  The kubelet binds app.conf for the container's subPath.",
        "2  A ConfigMap update writes a new directory, moves ..data, and deletes the old file.",
        "3  The container restarts: runc cannot bind a deleted file. bindguard re-binds it first.",
    ]):
        picture.text(20, 240 + 24 * number, line)
    picture.write(path)


# Terminals.

def run(command, columns):
    """The output of a command that has a terminal, with its colours."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns))
        os.environ.pop("NO_COLOR", None)
        os.execvp("sh", ["sh", "-c", f"stty cols {columns} rows 50; {command}"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    output = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:
            break
        if not read:
            break
        output += read
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.decode("utf-8", "replace").replace("\r\n", "\n")
    # 1 says that there are findings
    if status not in (0, 1):
        sys.exit(f"draw: {command} ends with {status}:\n{text}")
    return text


def runs_of(line):
    """The parts of a line that have a style: (text, classes)."""
    colour, weight = "plain", set()
    runs = []
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if not part.startswith("\x1b["):
            runs.append((part, " ".join([colour, *sorted(weight)])))
            continue
        for code in [int(code or 0) for code in part[2:-1].split(";")]:
            if code == 0:
                colour, weight = "plain", set()
            elif code in (1, 2):
                weight.add("bold" if code == 1 else "dim")
            elif code == 22:
                weight = set()
            elif code == 39:
                colour = "plain"
            elif 30 <= code <= 37 or 90 <= code <= 97:
                colour = SGR[code % 10]
            else:
                sys.exit(f"draw: the terminal has no style {code}")
    return runs


def wrapped(runs, columns):
    """Lines of at most so many columns; the rest of a long line begins below."""
    lines, width = [[]], 0
    for text, classes in runs:
        while width + len(text) > columns:
            lines[-1].append((text[: columns - width], classes))
            text = text[columns - width:]
            lines.append([])
            width = 0
        lines[-1].append((text, classes))
        width += len(text)
    return lines


def terminal(words):
    options = argparse.ArgumentParser(prog="draw.py terminal")
    options.add_argument("file")
    options.add_argument("--columns", type=int, default=110)
    options.add_argument("--replace", action="append", default=[])
    options.add_argument("--read", action="store_true")
    options.add_argument("command", nargs="+")
    options = options.parse_args(words)
    lines = []
    for command in options.command:
        output = sys.stdin.read() if options.read else run(command, options.columns)
        for pair in options.replace:
            old, new = pair.split("=", 1)
            output = output.replace(old, new)
        if lines:
            lines.append([])
        lines.append([("$ ", "quiet bold"), (command, "plain bold")])
        for line in output.rstrip("\n").split("\n"):
            lines += wrapped(runs_of(line), options.columns)
    size, height, edge = 14, 18, 14
    columns = max(sum(len(text) for text, _ in line) for line in lines)
    width = round(columns * size * ADVANCE + 2 * edge)
    picture = Picture(width, len(lines) * height + 2 * edge, " and ".join(options.command), size)
    for number, line in enumerate(lines):
        x = edge
        for text, classes in line:
            # A run begins and ends with a glyph, so that no renderer drops the spaces that the length counts.
            body = text.strip(" ")
            start = x + (len(text) - len(text.lstrip(" "))) * picture.step
            picture.text(start, edge + number * height + 14, body, classes)
            x += len(text) * picture.step
    picture.write(options.file, frame=True)


def main():
    words = sys.argv[1:]
    if words[:1] == ["terminal"]:
        terminal(words[1:])
    elif words[:1] == ["drawings"] and len(words) == 2:
        parts(os.path.join(words[1], "parts.svg"))
        race(os.path.join(words[1], "race.svg"))
        stale_bind(os.path.join(words[1], "stale-bind.svg"))
    else:
        sys.exit(__doc__)


main()
