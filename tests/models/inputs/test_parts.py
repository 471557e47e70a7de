"""A user's file brings parts of a preparation, which travel in a checkpoint by their kinds."""

from dataclasses import replace

import numpy as np
import pytest

from models import Embodiment, Normalizer, Processor
from models.config import from_json, to_json
from models.families.pi.fast.written import WrittenTokens
from models.files.own_file import run_file
from models.inputs.action_tokens import ActionTokens
from models.inputs.bpe import ByteBpe
from models.inputs.parts import kinds, part_class
from models.inputs.pictures import PictureFit, picture_fit
from models.inputs.prompts import PromptReader, TemplatePrompt
from models.inputs.tokenizer import Tokenizer
from tests.helpers.models.groot_whole import WHOLE
from tests.helpers.models.processors import tokens_of

OWN = """
from dataclasses import dataclass
import numpy as np
from models.inputs.pictures import PictureFit
from models.inputs.prompts import PromptReader
from models.inputs.tokenizer import TextTokenizer

@dataclass(frozen=True)
class Letters(TextTokenizer, kind="{name}-letters"):
    shift: int = 0
    begin, end, size = 0, 1, 200

    def encode(self, text):
        return np.array([ord(x) + self.shift for x in text], np.int32)

    def decode(self, ids):
        return "".join(chr(i - self.shift) for i in ids)

@dataclass(frozen=True)
class Shouted(PromptReader, kind="{name}-shouted"):
    marks: int = 1

    def tokens(self, prompt, state, pictures):
        return self.found().encode(prompt.upper() + "!" * self.marks), ()

@dataclass(frozen=True)
class Corner(PictureFit, kind="{name}-corner"):
    def __call__(self, image):
        return image[: self.size, : self.size].copy()
"""
ROBOT = Embodiment("arm", ("front",), Normalizer.identity(2), Normalizer.identity(1))


def test_a_users_parts_prepare_and_come_back_from_json(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(name="mine"))
    saved = {
        **{"state_dim": 2, "action_dim": 1, "horizon": 3, "state_input": "none"},
        "embodiments": [to_json(ROBOT)],
        "prompts": {
            "kind": "mine-shouted",
            "tokenizer": {"kind": "mine-letters", "shift": 3},
            "limit": 9,
            "marks": 2,
        },
        "pictures": {"kind": "mine-corner", "size": 4},
    }
    with pytest.raises(ValueError, match=r"kind is 'mine-shouted'.*--family path/to/file.py"):
        from_json(Processor, saved, "assets.processor")
    module = run_file(file)
    processor = from_json(Processor, saved, "assets.processor")
    assert processor.prompts == module.Shouted(module.Letters(3), 9, 2)
    assert from_json(Processor, to_json(processor)) == processor
    picture = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)
    made = processor.sample([picture], np.zeros(2), "lift")
    assert processor.tokenizer.decode(made.text) == "LIFT!!"
    np.testing.assert_array_equal(made.images[0], picture[:4, :4])
    with pytest.raises(ValueError, match="at most 9"):
        processor.sample([picture], np.zeros(2), "lift the block")


def test_two_files_cannot_define_one_kind(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(OWN.format(name="same"))
    run_file(tmp_path / "one.py")
    with pytest.raises(ValueError, match=r"two\.py defines a part of kind 'same-letters', but"):
        run_file(tmp_path / "two.py")


def test_a_kind_of_another_part_is_refused_and_a_familys_own_is_found():
    with pytest.raises(ValueError, match=r"'template', which is no PictureFit; expected one of"):
        picture_fit("template", 8)
    assert part_class(ActionTokens, "written_fast") is WrittenTokens
    assert {"template", "eagle_turn"} <= set(kinds(PromptReader))
    assert len(kinds(PictureFit)) >= 5


def test_a_tokenizer_that_adds_no_token_loses_none_of_a_later_piece():
    text = ByteBpe.read(WHOLE / "eagle")
    reader = TemplatePrompt(text)
    processor = Processor(2, 1, 3, "none", (ROBOT,), reader, picture_fit("antialiased", 4))
    wanted = [*text.encode("lift").tolist(), *text.encode("\n").tolist()]
    assert tokens_of(processor, "lift", np.zeros(2)).tolist() == wanted
    words = Tokenizer(("lift",))
    plain = replace(processor, prompts=TemplatePrompt(words))
    assert tokens_of(plain, "lift", np.zeros(2)).tolist() == [
        1,
        *words.encode("lift\n").tolist()[1:],
    ]


def test_a_prompt_with_a_state_needs_a_model_that_reads_it_there():
    reader = TemplatePrompt(Tokenizer(("lift",)), template=("{prompt} {state}",))
    with pytest.raises(ValueError, match="state_input is 'none', but the prompt has a state in it"):
        Processor(2, 1, 3, "none", (ROBOT,), reader, picture_fit("antialiased", 4))
