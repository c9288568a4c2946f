"""What a message about a file of data advises is done as it stands, and the file is read then."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from optrun.base.errors import ConfigError
from optrun.data.content import refuse_other_content
from optrun.data.files import read_files
from tests.running import TINY_BERT, optrun

ROWS = "text,label\n" + "“a” – café,x\nb,y\n" * 6
SAME = ROWS.splitlines()[1].split(",")[0]
FILES = {
    # name: bytes, the line of the advice that a shell takes, the file that is to be read then
    "of windows.csv": (ROWS.encode("cp1252"), "iconv -f cp1252", "utf8-of windows.csv"),
    "utf16.csv": (ROWS.encode("utf-16"), "iconv -f utf-16 ", "utf8-utf16.csv"),
    "be.tsv": (b"\xfe\xff" + ROWS.replace(",", "\t").encode("utf-16-be"), "iconv -f utf-16 ", "utf8-be.tsv"),
    "bare.csv": (ROWS.encode("utf-16-le"), "iconv -f utf-16le", "utf8-bare.csv"),
    "utf32.csv": (ROWS.encode("utf-32"), "iconv -f utf-32", "utf8-utf32.csv"),
    "semi 16.csv": (ROWS.replace(",", "\t").encode("utf-16"), "iconv -f utf-16 ", "utf8-semi 16.csv"),
    "it's.csv": (ROWS.replace(",", ";").encode(), "python -c", "new-it's.csv"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def do(message: str, begin: str) -> None:
    """Run the line of a message that begins so."""
    line = message[message.index(begin) :].replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)


@pytest.mark.parametrize("name", FILES)
def test_the_line_that_converts_a_file(name: str) -> None:
    content, begin, made = FILES[name]
    Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_files("data.train", name, documents=False)
    do(str(refused.value), begin)
    if name.startswith("semi"):  # two things are wrong with it
        with pytest.raises(ConfigError, match=re.escape("Call it utf8-semi 16.tsv.")):
            read_files("data.train", made, documents=False)
        made = str(Path(made).rename("utf8-semi 16.tsv"))
    rows = read_files("data.train", made, documents=False)
    assert rows[0] == {"text": SAME, "label": "x"}


def test_a_file_that_is_called_otherwise(here: Path) -> None:
    for name, content in {"tabs.csv": ROWS.replace(",", "\t"), "json.csv": '{"text":"a","label":"b"}\n'}.items():
        Path(name).write_text(content)
        with pytest.raises(ConfigError) as refused:
            refuse_other_content("data.train", Path(name), "csv")
        called = re.search(r"Call it (\S+)\.$", str(refused.value))
        assert called is not None
        assert len(read_files("data.train", str(Path(name).rename(called[1])), documents=False))


def test_folders_of_texts() -> None:
    for number, kind in enumerate(["good", "bad"] * 3):
        Path("the texts", kind).mkdir(parents=True, exist_ok=True)
        Path("the texts", kind, f"{number}.txt").write_text(f"a {kind} one\nof two lines")
    with pytest.raises(ConfigError) as refused:
        read_files("data.train", "the texts", documents=False)
    message = str(refused.value)
    pattern = re.search(r"such as '(.*?)'", message)
    assert pattern is not None
    assert len(read_files("data.train", pattern[1], documents=True)) == 6
    do(message, "python -c")
    rows = read_files("data.train", "the texts.csv", documents=False)
    assert [row["label"] for row in rows] == ["bad"] * 3 + ["good"] * 3
    assert rows[0]["text"] == "a bad one\nof two lines"
    Path("nothing").mkdir()
    with pytest.raises(ConfigError, match="no file in it ends with"):
        read_files("data.train", "nothing", documents=False)


def test_a_table_of_paths_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        Image.new("RGB", (32, 32), (30 * number, 0, 0)).save(f"{number}.png")
    Path("images.csv").write_text("file,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8)))
    words = ["task=image_classification", "model=vit_tiny", "data=files", "data.train=images.csv"]
    words += ["training.max_steps=1", "training.per_device_train_batch_size=2"]
    assert optrun(*words) == 2
    advised = re.search(r"give (data\.image_column=\S+)\.$", capsys.readouterr().err, re.MULTILINE)
    assert advised is not None
    assert optrun(*words, advised[1]) == 0
    assert optrun("task=sequence_classification", *TINY_BERT, *words[2:], "data.image_column=file") == 2
