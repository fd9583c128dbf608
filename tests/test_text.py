"""Text of models.py against transformers: prompts, turns, ends, and what damaged files say."""

import json

import pytest
import released

from models import Text

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One directory a family, with a model that is as small as can be: only its text is read."""
    root = tmp_path_factory.mktemp("released")
    sizes = dict(layers=1, width=8)
    return {name: released.make(name, root / name, **sizes) for name in released.FAMILIES}


def test_bos_is_what_the_checkpoint_says(checkpoints, tmp_path):
    for family, directory in checkpoints.items():
        text = Text(directory)
        wanted = family == "gemma3"
        assert (text.bos is not None) == wanted
        bare = text.encode("one two")
        assert text.encode("one two", bos=True) == ([text.bos] if wanted else []) + bare
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoints["gemma3"].glob("*.json"):
        (copy / path.name).write_bytes(path.read_bytes())
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    for said, wanted in ((True, 2), (False, None), (None, 2)):
        (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": said}))
        assert Text(copy).bos == wanted
