"""Damage to the files of a run and of a comparison, one at a time: whoever reads them says in one line what is wrong.

Every key of every JSON object, and of the recipe, is taken away or gets one of many odd values; bytes of safetensors
files are flipped, and their headers say other names, types and shapes. After each, everything that reads is tried.

$ python tests/damage.py            # all of it, in some minutes; what breaks the rule is printed
$ python tests/damage.py history    # only what has this in its name

The tests try a sample (test_damaged_directories.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import fedstrata
from fedstrata.core.errors import FedstrataError

VALUES = {
    "null": "null",
    "true": "true",
    "negative": "-1",
    "zero": "0",
    "fraction": "1.5",
    "huge": "1" + "0" * 400,
    "beyond digits": "1" + "0" * 5000,
    "beyond floats": "1e400",
    "large float": "1e308",
    "64 bits": str(2**63),
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "nothing": '""',
    "text": '"text"',
    "controls": '"\\u001b[2J\\n"',
    "half a pair": '"\\ud800"',
    "a zero byte": '"a\\u0000"',
    "out": '"../../.."',
    "list": "[]",
    "list of null": "[null]",
    "object": "{}",
    "odd object": '{"a": {"b": [1]}}',
    "deep": "[" * 300 + "]" * 300,
    "very deep": "[" * 100_000 + "]" * 100_000,
}
"""As they stand in a JSON file."""

TOML_VALUES: dict[str, Any] = {
    "true": True,
    "negative": -1,
    "zero": 0,
    "fraction": 1.5,
    "huge": 10**400,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "nothing": "",
    "text": "text",
    "controls": "\x1b[2J\n",
    "code": "nowhere:thing",
    "list": [],
    "list of lists": [[1], ["a"]],
    "object": {},
    "odd object": {"a": {"b": [1]}},
    "deep": json.loads('{"a":' * 40 + "1" + "}" * 40),
}


@dataclass(frozen=True)
class Damage:
    """What is done to the files below a folder, and its name."""

    name: str
    do: Callable[[Path], None]


def damages(good: Path) -> Iterator[Damage]:
    """All that is done to a run that is whole; of a comparison, to its own file and to what one of its runs is."""
    files = sorted(path for path in good.rglob("*") if path.is_file())
    if (good / "compare.json").exists():
        files = [good / "compare.json", next(path for path in files if path.name == "run.json")]
    for file in files:
        name = str(file.relative_to(good))
        if file.suffix == ".json":
            yield from _json_damages(name, [json.loads(file.read_text())])
        elif file.suffix == ".jsonl":
            yield from _json_damages(name, [json.loads(line) for line in file.read_text().splitlines()])
        elif file.suffix == ".toml":
            yield from _toml_damages(name, tomllib.loads(file.read_text()))
        elif file.suffix == ".safetensors":
            yield from _array_damages(name, file.read_bytes())
        yield Damage(f"{name}: gone", _applying(Path.unlink, name))
        for what, content in (("empty", b""), ("no text", b"\xff\xfe\n"), ("a line", b"\n"), ("no object", b"3\n")):
            yield Damage(f"{name}: {what}", _writing(name, content))
        yield Damage(f"{name}: a folder", _applying(_become_folder, name))


def _applying(change: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    return lambda folder: change(folder / name)


def _writing(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, content)


def _forging(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: _forge(folder / name, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


_MARK = "<the odd value>"


def _json_damages(name: str, objects: list[Any]) -> Iterator[Damage]:
    """Of a file with an object in each line."""

    def written(changed: Any, at: int, raw: str = "") -> bytes:
        texts = [json.dumps(changed if n == at else one) for n, one in enumerate(objects)]
        return ("\n".join(texts) + "\n").replace(json.dumps(_MARK), raw).encode()

    for at, one in enumerate(objects):
        for path in _places(one):
            where = f"{name}: {at + 1}: {'.'.join(map(str, path))}"
            for what, raw in VALUES.items():
                content = written(_changed(one, path, _MARK), at, raw)
                yield Damage(f"{where} = {what}", _writing(name, content))
            content = written(_changed(one, path, ...), at)
            yield Damage(f"{where} gone", _writing(name, content))
            content = written(_changed(one, (*path[:-1], "unheard of"), 3), at)
            yield Damage(f"{where}: a key beside it", _writing(name, content))


def _toml_damages(name: str, table: dict[str, Any]) -> Iterator[Damage]:
    """With the digest that belongs to what was changed, as by somebody who knows of it."""
    for path in _places(table):
        where = f"{name}: {'.'.join(map(str, path))}"
        for what, value in TOML_VALUES.items():
            changed = tomli_w.dumps(_changed(table, path, value)).encode()
            yield Damage(f"{where} = {what}", _forging(name, changed))
        changed = tomli_w.dumps(_changed(table, path, ...)).encode()
        yield Damage(f"{where} gone", _forging(name, changed))
    for what, content in (("deep", b"a = " + b"[" * 100_000), ("digits", b"seed = 1" + b"0" * 5000)):
        yield Damage(f"{name}: {what}", _forging(name, content))


def _forge(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    about = json.loads(path.with_name("run.json").read_text())
    about["recipe_sha256"] = hashlib.sha256(content).hexdigest()
    path.with_name("run.json").write_text(json.dumps(about))


def _array_damages(name: str, content: bytes) -> Iterator[Damage]:
    draw, length = random.Random(name), int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    places = [*range(10), *(draw.randrange(8, 8 + length) for _ in range(30))]
    places += [draw.randrange(8 + length, len(content)) for _ in range(5)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        yield Damage(f"{name}: byte {place}", _writing(name, bytes(flipped)))
    for end in (7, 8, 8 + length // 2, 8 + length, len(content) - 1):
        yield Damage(f"{name}: ends at {end}", _writing(name, content[:end]))

    def put(what: str, changed: Mapping[str, Any], data: bytes = data) -> Damage:
        text = json.dumps(changed).encode()
        whole = len(text).to_bytes(8, "little") + text + data
        return Damage(f"{name}: {what}", lambda folder: _write(folder / name, whole))

    for key, entry in header.items():
        yield put(f"{key} gone", {k: v for k, v in header.items() if k != key})
        yield put(f"{key} renamed", {("renamed" if k == key else k): v for k, v in header.items()})
        if key == "__metadata__":
            for odd in ({}, {**entry, "round": "7"}, {**entry, "run": ""}, {**entry, "round": "\x1b[2J"}, {"round": 1}):
                yield put(f"metadata {odd}", header | {key: odd})
            continue
        for kind in ("F64", "I64", "U64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F4", "I8", "BOOL", "C64", "X"):
            width = {"I8": 1, "BOOL": 1, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}.get(kind, 8)
            first, last = entry["data_offsets"]
            for shape in ([(last - first) // width], entry["shape"]):
                yield put(f"{key} is {kind} {shape}", header | {key: entry | {"dtype": kind, "shape": shape}})
        for shape in ([], [0], [-1], [1, *entry["shape"]], entry["shape"][::-1], [2**62, 4], ["a"], None):
            yield put(f"{key} has shape {shape}", header | {key: entry | {"shape": shape}})
    for what, number in (
        ("NaN", "000000000000f87f"),
        ("large", "ffffffffffffef7f"),
        ("ones", "ff" * 8),
        ("zeros", "00" * 8),
    ):
        yield put(f"numbers are {what}", header, (bytes.fromhex(number) * len(data))[: len(data)])


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every key is, and the first element of every list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from _places(part, (*path, key))


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value in a place, or without it if that is `...`."""
    key, *rest = path
    if isinstance(value, list):
        if not isinstance(key, int):
            return value
        part = [] if new is ... and not rest else [_changed(value[key], tuple(rest), new) if rest else new]
        return [*value[:key], *part, *value[key + 1 :]]
    if rest:
        return value | {key: _changed(value[key], tuple(rest), new)}
    return {k: v for k, v in value.items() if k != key} if new is ... else value | {key: new}


# --- what reads ------------------------------------------------------------------------------------------------------


def problems(folder: Path) -> list[str]:
    """What is wrong with how commands and functions read the run or the comparison in `folder`/runs/it."""
    place, page = folder / "runs" / "it", folder / "page.html"
    found = []
    for command in (("show", place), ("list", "runs"), ("report", place, "--out", page), ("report", place.parent)):
        code, err = _call(folder, [str(part) for part in command])
        if code not in (0, 2) or err.count("\n") != (1 if code else 0):
            found.append(f"{command[0]}: code {code}: {err[-1500:]}")
    if (place / "run.json").exists():
        calls: dict[str, Callable[[], object]] = {
            "summary": lambda: fedstrata.Run(place).summary(),
            "curve": lambda: fedstrata.Run(place).curve(),
        }
        calls |= {"reopen": lambda: _reopen(place), "finished": lambda: fedstrata.Run(place).finished()}
        for name, call in calls.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    call()
            except (FedstrataError, OSError) as error:
                if "\n" in str(error) or len(str(error)) > 2000:
                    found.append(f"{name}: not one line: {error}")
            except BaseException:
                found.append(f"{name}: {traceback.format_exc()[-1500:]}")
    return found


def _reopen(place: Path) -> None:
    from fedstrata.runs.runner import reopen

    reopen(place, {"training.rounds": 5})


def _call(folder: Path, argv: list[str]) -> tuple[int, str]:
    from fedstrata.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, here = sys.argv, Path.cwd()
    sys.argv = ["fedstrata", *argv]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("error")
            main()
    except SystemExit as end:
        return int(end.code or 0), err.getvalue()
    except BaseException:
        return -1, traceback.format_exc()
    finally:
        sys.argv = before
        os.chdir(here)
    return 0, err.getvalue()


def make(folder: Path) -> tuple[Path, Path]:
    """A run with lost replies and its comparison with another."""
    from fedstrata.runs.compare import begin_comparison, run_job

    table = {
        "name": "tiny",
        "task": {
            "dataset": "mnist-mini",
            "partition": {"name": "iid", "clients": 3, "samples": 12},
            "model": {"name": "mlp", "hidden": 2},
        },
        "algorithm": {"name": "fedlap", "weighting": {"name": "fedadp"}},
        "training": {"rounds": 2, "batch_size": 6, "lr": 0.1, "dropouts": 0.4, "attempts": 9, "min_replies": 0.4},
        "evaluation": {"on": ["test", "clients"], "target": 0.9},
        "engine": {"workers": 1},
    }
    run = fedstrata.run(table, seed=1, out=folder / "run").path
    comparison = begin_comparison(table, ["fedavg", "fedldf:n=1"], [0], out=folder / "compared")
    for job in comparison.jobs:
        list(run_job(job))
    return run, comparison.path


def tried(good: Path, damage: Damage) -> list[str]:
    """What is wrong after it was done to a copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "runs" / "it"
        shutil.copytree(good, copy)
        damage.do(copy)
        return problems(Path(folder))


def main() -> None:
    """Try everything."""
    count = bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for good in make(Path(folder)):
            for damage in damages(good):
                if not all(word in f"{good.name}/{damage.name}" for word in sys.argv[1:]):
                    continue
                count += 1
                for problem in tried(good, damage):
                    bad += 1
                    print(f"--- {good.name}/{damage.name}\n{problem}", flush=True)
    print(f"{count} damages, {bad} not said in one line")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
