"""What a page says: its text, its code, its commands and the names in backticks."""

import re

from conftest import ROOT

STARTS = r"(python3?|pip|torchrun|grep|sh) "  # a name in backticks that begins so is a command


class Page:
    """One file of Markdown or several.

    blocks: (language, text) of each block. spans: what stands in backticks. commands: the lines of
    blocks without a language, and the spans that are commands; parts that && joins are several.
    """

    def __init__(self, *files):
        self.text = "\n".join((ROOT / file).read_text() for file in files)
        self.blocks = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, flags=re.S | re.M)
        self.prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.S | re.M)
        self.spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]
        texts = [text for language, text in self.blocks if not language]
        texts += [span for span in self.spans if re.match(STARTS, span)]
        lines = [line for text in texts for line in lines_of(text)]
        self.commands = {command for line in lines for command in line.split(" && ")}

    def code(self, language):
        """Return the blocks of a language, in order."""
        return [text for name, text in self.blocks if name == language]


def lines_of(block):
    """Return the lines of a block of shell commands, those that end in a backslash joined."""
    return [" ".join(line.split()) for line in block.replace("\\\n", "").splitlines()]
