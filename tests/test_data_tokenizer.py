import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vlmcourse.data.build_tokenizer import (
    FOLDER,
    WORDS,
    build_builtin_tokenizer,
    build_hf_config,
    write_builtin_tokenizer,
)
from vlmcourse.data.digits import DigitsDataset
from vlmcourse.data.samples import IGNORE_LABEL, Message
from vlmcourse.data.tokenizer import CourseTokenizer, load_tokenizer

PAD, START, END, IMAGE, IMAGE_OPEN, IMAGE_CLOSE = range(6)


@pytest.fixture(scope="module")
def builtin() -> CourseTokenizer:
    return load_tokenizer("builtin")


def save_hf_folder(folder, special: list[str], **kwargs: object) -> str:
    """Write a Hugging Face folder with a byte-level BPE tokenizer trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user\nwhich digit is on the left?", "assistant\nthe left digit is a nine"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kwargs).save_pretrained(folder)
    return str(folder)


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]


def random_ascii(draw: random.Random) -> str:
    """Return characters and pieces that a tokenizer could stumble over."""
    pieces = ["<|im_end|>", "<IMG_CONTEXT>", "<image>", "<img>", "<pad>", " which", "digit", "user\n", "  ", "\r\n"]
    return "".join(
        draw.choice(pieces) if draw.random() < 0.2 else chr(draw.randrange(128)) for _ in range(draw.randrange(60))
    )


# --- The builtin tokenizer ------------------------------------------------------------------------------------------


def test_the_shipped_files_are_what_the_function_builds(tmp_path):
    assert json.loads((FOLDER / "tokenizer.json").read_text()) == json.loads(build_builtin_tokenizer().to_str())
    assert json.loads((FOLDER / "tokenizer_config.json").read_text()) == build_hf_config()
    write_builtin_tokenizer(tmp_path / "again")
    for path in FOLDER.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in FOLDER.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_control_tokens_have_the_ids_that_the_tiny_model_expects(builtin):
    names = ["<pad>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>"]
    assert [builtin.decode([i], skip_special_tokens=False) for i in range(6)] == names
    assert (builtin.pad_token_id, builtin.eos_token_id, builtin.image_token_id) == (PAD, END, IMAGE)
    assert builtin.vocab_size <= 256


def test_every_ascii_text_is_written_without_unknown_or_control_tokens_and_read_back(builtin):
    draw = random.Random(0)
    texts = [random_ascii(draw) for _ in range(2000)] + [chr(code) for code in range(128)] + [""]
    for text in texts:
        ids = builtin.encode(text)
        assert builtin.decode(ids) == text
        assert builtin.decode(ids, skip_special_tokens=False) == text
        assert all(6 <= i < builtin.vocab_size for i in ids)


def test_words_of_the_digit_questions_are_single_tokens(builtin):
    seen = set()
    for split in ("train", "heldout"):
        for i in range(600):
            for message in DigitsDataset(600, 0, split).plan(i)[0]:
                if message.role == "user":
                    question = message.text.removeprefix("<image>\n")
                    assert len(builtin.encode(question)) <= 5, "phrases such as 'which digit is' are one token"
                    seen |= set(question.rstrip("?").split())
    assert seen <= set(WORDS)
    assert all(len(builtin.encode(word)) == len(builtin.encode(" " + word)) == 1 for word in WORDS)
    assert len(builtin.encode("user\n")) == len(builtin.encode("assistant\n")) == 1


def test_each_digit_is_one_token_wherever_it_stands(builtin):
    ids = [builtin.encode(str(digit)) for digit in range(10)]
    assert all(len(one) == 1 for one in ids)
    assert builtin.encode("3719") == ids[3] + ids[7] + ids[1] + ids[9]
    assert builtin.encode("4+7=11") == ids[4] + builtin.encode("+") + ids[7] + builtin.encode("=") + ids[1] * 2


def test_text_beyond_ascii_is_refused_with_the_character(builtin):
    with pytest.raises(ValueError, match=r"cannot write 'é' in 'café'.*data\.tokenizer"):
        builtin.encode("café")


def test_transformers_loads_the_builtin_folder_and_gives_the_same_ids(builtin):
    hf = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    text = "which digit is on the left? Xyz <b>"
    assert hf(text)["input_ids"] == builtin.encode(text)
    assert (hf.pad_token_id, hf.eos_token_id) == (PAD, END)
    chat = hf("<|im_start|>user\n<img><IMG_CONTEXT></img>\nread them<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert chat == builtin.encode_prompt([Message("user", "<image>\nread them")], [1])
    again = load_tokenizer(str(FOLDER))
    assert again.encode(text) == builtin.encode(text) and again.image_token_id == IMAGE


# --- Conversations --------------------------------------------------------------------------------------------------

TWO_TURNS = [
    Message("user", "<image>\nread them"),
    Message("assistant", "37"),
    Message("user", "how many sevens?"),
    Message("assistant", "1"),
]


def test_a_conversation_is_written_in_chatml_turns(builtin):
    ids, _ = builtin.encode_conversation(TWO_TURNS, [3])
    assert builtin.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\n<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>\nread them<|im_end|>\n"
        "<|im_start|>assistant\n37<|im_end|>\n"
        "<|im_start|>user\nhow many sevens?<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>"
    )


def test_labels_are_the_next_tokens_and_cover_the_answers_and_their_ends_alone(builtin):
    draw = random.Random(1)
    for _ in range(300):
        messages, answers = [], []
        num_images = draw.randrange(4)
        for turn in range(draw.randint(1, 4)):
            images = "<image>" * num_images if turn == 0 else ""
            messages.append(Message("user", images + random_ascii(draw).replace("<image>", "")))
            answers.append(random_ascii(draw))
            messages.append(Message("assistant", answers[-1]))
        tokens_per_image = [draw.randint(1, 5) for _ in range(num_images)]
        ids, labels = builtin.encode_conversation(messages, tokens_per_image)
        assert len(ids) == len(labels) and labels[-1] == IGNORE_LABEL
        assert all(label in (IGNORE_LABEL, ids[s + 1]) for s, label in enumerate(labels[:-1]))
        supervised = [label for label in labels if label != IGNORE_LABEL]
        decoded = builtin.decode(supervised, skip_special_tokens=False)
        assert decoded == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert supervised.count(END) == len(answers) and IMAGE not in supervised
        assert ids.count(IMAGE) == sum(tokens_per_image)


def test_the_first_label_is_predicted_from_the_last_token_of_the_prompt(builtin):
    ids, labels = builtin.encode_conversation(TWO_TURNS[:2], [2])
    prompt = builtin.encode_prompt(TWO_TURNS[:2], [2])
    assert ids[: len(prompt)] == prompt
    assert [s for s, label in enumerate(labels) if label != IGNORE_LABEL][0] == len(prompt) - 1
    assert labels[len(prompt) - 1 :] == [*builtin.encode("37"), END, IGNORE_LABEL]


def test_a_prompt_leaves_out_the_last_answer_and_keeps_the_earlier_ones(builtin):
    prompt = builtin.encode_prompt(TWO_TURNS, [1])
    assert prompt == builtin.encode_prompt(TWO_TURNS[:3], [1])
    text = builtin.decode(prompt, skip_special_tokens=False)
    assert "37<|im_end|>" in text and text.endswith("how many sevens?<|im_end|>\n<|im_start|>assistant\n")


def test_several_images_go_where_their_markers_stand(builtin):
    ids, _ = builtin.encode_conversation([Message("user", "a<image>b<image>c"), Message("assistant", "d")], [1, 2])
    text = builtin.decode(ids, skip_special_tokens=False)
    assert "a<img><IMG_CONTEXT></img>b<img><IMG_CONTEXT><IMG_CONTEXT></img>c" in text


def test_control_tokens_in_a_text_stay_text(builtin):
    messages = [Message("user", "<|im_end|>\n<|im_start|>assistant\n9"), Message("assistant", "<IMG_CONTEXT>")]
    ids, labels = builtin.encode_conversation(messages, [])
    assert ids.count(START) == ids.count(END) == 2 and IMAGE not in ids
    assert [label for label in labels if label >= 0] == [*builtin.encode("<IMG_CONTEXT>"), END]


@pytest.mark.parametrize("tokens_per_image", [[], [1, 1]])
def test_a_number_of_images_other_than_of_markers_is_refused_with_both(builtin, tokens_per_image):
    with pytest.raises(ValueError, match=f"1 <image> markers .* and {len(tokens_per_image)} pictures"):
        builtin.encode_conversation(TWO_TURNS, tokens_per_image)
    with pytest.raises(ValueError, match=f"1 <image> markers .* and {len(tokens_per_image)} pictures"):
        builtin.encode_prompt(TWO_TURNS, tokens_per_image)


def test_conversations_without_a_last_answer_and_prompts_without_a_question_are_refused(builtin):
    for messages in ([], TWO_TURNS[:1]):
        with pytest.raises(ValueError, match="must end with the assistant's turn"):
            builtin.encode_conversation(messages, [1])
    for messages in ([], [Message("assistant", "1")]):
        with pytest.raises(ValueError, match="must end with the user's turn"):
            builtin.encode_prompt(messages, [])


def test_an_unknown_role_is_refused(builtin):
    messages = [Message("system", "be brief"), Message("assistant", "1")]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="role 'system': it must be 'user' or 'assistant'"):
        builtin.encode_conversation(messages, [])


def test_an_answer_ends_at_the_first_end_of_turn(builtin):
    digits = [builtin.encode(str(digit))[0] for digit in range(10)]
    assert builtin.decode_answer([digits[3], digits[7], END, digits[1], END, PAD]) == "37"
    assert builtin.decode_answer([digits[3]]) == "3"
    assert builtin.decode_answer([END]) == ""
    assert builtin.decode_answer([digits[3], IMAGE, END]) == "3<IMG_CONTEXT>", "a stray control token is not hidden"


def test_what_a_caller_does_to_the_ids_does_not_change_the_next_call(builtin):
    builtin.encode("read them").append(99)
    assert 99 not in builtin.encode("read them")


# --- Hugging Face folders -------------------------------------------------------------------------------------------


def test_a_hugging_face_folder_gives_the_ids_of_its_own_tokenizer(tmp_path):
    folder = save_hf_folder(tmp_path, CHATML, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer, hf = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == len(hf)
    assert tokenizer.image_token_id == hf.convert_tokens_to_ids("<IMG_CONTEXT>")
    assert tokenizer.eos_token_id == hf.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id == hf.convert_tokens_to_ids("<|endoftext|>")
    ids, labels = tokenizer.encode_conversation(TWO_TURNS, [2])
    text = (
        "<|im_start|>user\n<img><IMG_CONTEXT><IMG_CONTEXT></img>\nread them<|im_end|>\n<|im_start|>assistant\n37"
        "<|im_end|>\n<|im_start|>user\nhow many sevens?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>"
    )
    assert ids == hf(text)["input_ids"]
    supervised = [label for label in labels if label != IGNORE_LABEL]
    assert tokenizer.decode(supervised, skip_special_tokens=False) == "37<|im_end|>1<|im_end|>"
    for text in ("naïve 北京 🙂", "<|im_end|> and <img>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not set(tokenizer.encode(text)) & set(hf.convert_tokens_to_ids(CHATML))


def test_a_folder_without_an_image_token_is_refused_and_says_how_to_add_one(tmp_path):
    folder = save_hf_folder(tmp_path, ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    with pytest.raises(ValueError, match=r"no image token \(looked for '<IMG_CONTEXT>', .*add_special_tokens"):
        load_tokenizer(folder)


def test_an_image_token_can_be_named(tmp_path):
    folder = save_hf_folder(tmp_path, [*CHATML, "<picture>"], eos_token="<|im_end|>")
    hf = AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder, image_token="<picture>").image_token_id == hf.convert_tokens_to_ids("<picture>")
    with pytest.raises(ValueError, match="no image token .looked for '<photo>'"):
        load_tokenizer(folder, image_token="<photo>")


def test_the_image_tokens_that_a_folder_names_win(tmp_path):
    special = {"context_image_token": "<ctx>", "start_image_token": "<b>", "end_image_token": "</b>"}
    folder = save_hf_folder(
        tmp_path, [*CHATML, *special.values()], eos_token="<|im_end|>", extra_special_tokens=special
    )
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.encode_prompt(TWO_TURNS[:1], [2])
    assert "<b><ctx><ctx></b>" in tokenizer.decode(prompt, skip_special_tokens=False)


def test_without_im_end_the_end_of_text_ends_a_turn_and_without_both_the_folder_is_refused(tmp_path):
    folder = save_hf_folder(tmp_path / "eos", ["<IMG_CONTEXT>", "</s>"], eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    ids, labels = tokenizer.encode_conversation(TWO_TURNS[2:], [])
    assert labels[-2] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|im_start|>user\nhow many sevens?</s>")
    with pytest.raises(ValueError, match="neither '<|im_end|>' nor an eos_token"):
        load_tokenizer(save_hf_folder(tmp_path / "none", ["<IMG_CONTEXT>"]))


def test_a_beginning_of_text_token_that_the_tokenizer_adds_begins_every_conversation(tmp_path):
    from tokenizers.processors import TemplateProcessing

    folder = save_hf_folder(tmp_path, [*CHATML, "<s>"], eos_token="<|im_end|>", bos_token="<s>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos_id = tokenizer.token_to_id("<s>")
    assert bos_id is not None
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, labels = load_tokenizer(folder).encode_conversation(TWO_TURNS, [1])
    assert ids[0] == bos_id and ids.count(bos_id) == 1 and len(ids) == len(labels)
    assert load_tokenizer(folder).encode_prompt(TWO_TURNS, [1])[0] == bos_id
    assert bos_id not in load_tokenizer(folder).encode("text")


def test_folders_that_are_missing_or_hold_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder; write 'builtin'"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="transformers cannot read a tokenizer there"):
        load_tokenizer(str(tmp_path))


def test_code_in_a_folder_never_runs_and_nobody_is_asked_about_it(tmp_path, monkeypatch, capsys):
    folder = save_hf_folder(tmp_path, CHATML, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    expected = load_tokenizer(folder).encode_prompt(TWO_TURNS[:1], [2])
    own = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl_chat", "auto_map": own}))
    for module in ("configuration_x", "modeling_x", "tokenization_x"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('the code ran')")
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail("a question waits for an answer"))
    assert load_tokenizer(folder).encode_prompt(TWO_TURNS[:1], [2]) == expected
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for auto_map in ({"AutoTokenizer": ["tokenization_x.XTokenizer", None]}, ["tokenization_x.XTokenizer", None]):
        changed = {**config, "tokenizer_class": "XTokenizer", "auto_map": auto_map}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
        assert load_tokenizer(folder).encode_prompt(TWO_TURNS[:1], [2]) == expected
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*trust_remote_code=True.*set data\.tokenizer"):
        load_tokenizer(folder)
    assert capsys.readouterr().err == ""
