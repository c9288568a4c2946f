"""What a message about a file of data advises is done as it stands, and the file is read then."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from optrun.base.errors import ConfigError
from optrun.data.stream import open_stream
from tests.running import TINY_BERT, optrun, read_files


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"), [("json.csv", b'{"text":"a","label":"b"}\n'), ("parquet.csv", b"")]
)
def test_a_file_that_is_called_otherwise(name: str, content: bytes) -> None:
    if content:
        Path(name).write_bytes(content)
    else:
        Dataset.from_dict({"text": ["a"]}).to_parquet(name)
    with pytest.raises(ConfigError) as refused:
        read_files("data.train", name, documents=False)
    called = re.search(r"Call it (\S+)\.$", str(refused.value))
    assert called is not None
    assert len(read_files("data.train", str(Path(name).rename(called[1])), documents=False))


def test_a_stream_that_is_no_utf8() -> None:
    Path("it's.jsonl").write_bytes('{"text": "caf\u00e9, a"}\n'.encode("cp1252"))
    with pytest.raises(ConfigError) as refused:
        open_stream("data.train", [Path("it's.jsonl")], 10, [])
    message = str(refused.value)
    subprocess.run(
        ["bash", "-c", message[message.index("iconv") :]], check=True, capture_output=True
    )
    assert open_stream("data.train", [Path("utf8-it's.jsonl")], 10, [])[0] == {
        "text": "caf\u00e9, a"
    }


def test_folders_of_texts_beside_tables() -> None:
    for number, kind in enumerate(["good", "bad"] * 3):
        Path("the texts", kind).mkdir(parents=True, exist_ok=True)
        Path("the texts", kind, f"{number}.txt").write_text(f"a {kind} one\nof two lines")
    Path("the texts", "good", "a.csv").write_text("text\na\n")
    with pytest.raises(ConfigError) as refused:
        read_files("data.train", "the texts", documents=False)
    pattern = re.search(r"such as '(.*?)'", str(refused.value))
    assert pattern is not None
    assert len(read_files("data.train", pattern[1].replace(".csv", ".txt"), documents=True)) == 6
    Path("nothing").mkdir()
    with pytest.raises(ConfigError, match="no file in it ends with"):
        read_files("data.train", "nothing", documents=False)


def test_a_table_of_paths_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    for number in range(8):
        Image.new("RGB", (32, 32), (30 * number, 0, 0)).save(f"mine/{number}.png")
    Path("mine/images.csv").write_text(
        "file,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8))
    )
    words = [
        "task=image_classification",
        "model=vit_tiny",
        "data=files",
        "data.train=mine/images.csv",
    ]
    words += ["training.max_steps=1", "training.per_device_train_batch_size=2"]
    assert optrun(*words) == 0
    assert "column file holds paths of images" in capsys.readouterr().out
    assert (
        optrun("task=sequence_classification", *TINY_BERT, *words[2:], "data.image_column=file")
        == 2
    )
