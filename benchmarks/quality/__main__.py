# SPDX-License-Identifier: Apache-2.0
"""What truncation costs the answers: train a small Llama, then compare TT, CA and NKVT.

    python -m benchmarks.quality                                         both, with the defaults
    python -m benchmarks.quality train [--text FILE]... [--minutes N] [--out DIR]
    python -m benchmarks.quality evaluate [--model DIR] [--json FILE] [--plot FILE] [--no-server]
    python -m benchmarks.quality codecs [--model DIR] [--json FILE]      what int8 and fp8 cost
    python -m benchmarks.quality codecs-served [--served N]              that of a server alone
    python -m benchmarks.quality documents [--quick] [--json FILE]       what reused documents cost

train goes on where an interrupted run left off, if the texts and the recipe are the same. What it
leaves in DIR is a model that transformers and vLLM load. methods.py says what the methods are.
documents trains a model of its own, that knows two hops, and asks an engine: see documents.py.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality import data, document_report, documents, picture, report
from benchmarks.quality.codecs import measure_codecs, measure_servers
from benchmarks.quality.codecs import tables as codec_tables
from benchmarks.quality.evaluate import Settings
from benchmarks.quality.export import CONFIG_FILE, export
from benchmarks.quality.measure import measure
from benchmarks.quality.model import Shape
from benchmarks.quality.train import (
    CHECKPOINT_FILE,
    Budget,
    Recipe,
    Trainer,
    bf16_is_faster,
    train,
)

MINUTES, MINUTES_TWO_HOPS = 12.0, 14.0
MODEL = data.ROOT / ".cache" / "quality"
MODEL_TWO_HOPS = MODEL.with_name("quality_documents")
TEXTS, CHAINS = 208, 40
RESULTS = data.ROOT / "results"
SERVED_DOCUMENTS = 24
STORED = {"bfloat16": torch.bfloat16, "float32": None}


def run_training(
    texts: list[Path], minutes: float, out: Path, shape: Shape, recipe: Recipe
) -> None:
    """Train until `minutes` are used in all; the model is exported when they are.

    Raises: ValueError if `out` holds training of other texts, shape or recipe.
    """
    made_of = data.fingerprint(texts, {"shape": asdict(shape), "recipe": asdict(recipe)})
    checkpoint, mark = out / CHECKPOINT_FILE, out / "made_of"
    out.mkdir(parents=True, exist_ok=True)
    if mark.exists():
        if mark.read_text(encoding="utf-8") != made_of:
            raise ValueError(f"{out} is of other texts or another recipe: name another --out")
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        corpus = data.Corpus.load(out)
    else:
        tokenizer, corpus = data.prepare(texts, shape.vocabulary)
        corpus.save(out)
        tokenizer.save(str(out / "tokenizer.json"))
        mark.write_text(made_of, encoding="utf-8")
    going_on = checkpoint.exists()
    lower = not going_on and bf16_is_faster(shape, corpus, recipe)
    trainer = Trainer(shape, corpus, recipe, lower=lower)
    if going_on:
        trainer.load(checkpoint)
    print(
        f"{trainer.model.num_parameters / 1e6:.1f}M parameters, {len(corpus.train):,} tokens of "
        f"text, products in {'bf16' if trainer.lower else 'fp32'}, "
        f"{trainer.progress.seconds / 60:.1f} of {minutes:g} minutes done",
        flush=True,
    )
    train(trainer, Budget(seconds=60 * minutes), checkpoint)
    export(trainer.model, tokenizer, out, torch.bfloat16)


def run_evaluation(
    model: Path, settings: Settings, results: Path, plot: Path, *, served: int
) -> None:
    """`served`: documents through a real server; 0: none is started."""
    result = measure(model, settings, served=served)
    write(result, results)
    picture.draw(result, plot)
    print(f"\n{report.tables(result)}")


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("train", "evaluate", "codecs", "codecs-served", "documents"),
        help="the first two, if left out",
    )
    parser.add_argument("--text", type=Path, action="append", help="to train on; may be repeated")
    parser.add_argument("--minutes", type=float, help="of training, in all (12; 14 for documents)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of texts")
    parser.add_argument("--model", "--out", type=Path, help="the model's directory (of .cache)")
    parser.add_argument("--two-hops", action="store_true", help="train the model of `documents`")
    parser.add_argument("--stored", choices=STORED, default="bfloat16", help="how KV is kept")
    parser.add_argument("--documents", type=int, default=Settings().documents)
    parser.add_argument("--texts", type=int, default=TEXTS, help="prompts of `documents`")
    parser.add_argument("--chains", type=int, default=CHAINS, help="those with questions")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of `documents`, in a file of its own"
    )
    parser.add_argument("--no-server", action="store_true", help="leave out the real server")
    parser.add_argument("--served", type=int, default=SERVED_DOCUMENTS, help="documents of it")
    parser.add_argument("--json", type=Path, help="of results/, if left out")
    parser.add_argument("--plot", type=Path, help="of results/, if left out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    args.two_hops |= args.command == "documents"
    kind = "_codecs" if "codecs" in str(args.command) else ""
    kind = "_documents" if args.two_hops else kind
    kind += "_quick" * args.quick  # beside the file that pages are held to
    args.model = args.model or (MODEL_TWO_HOPS if args.two_hops else MODEL)
    args.minutes = args.minutes or (MINUTES_TWO_HOPS if args.two_hops else MINUTES)
    args.json = args.json or RESULTS / f"quality{kind}.json"
    args.plot = args.plot or args.json.with_suffix(".svg")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    is_there = (args.model / CONFIG_FILE).exists()
    trains_first = args.command in (None, "documents")
    if args.command == "train" or (trains_first and not is_there):
        texts = args.text or data.default_texts()
        if args.two_hops:
            shape, recipe = Shape(layers=4), Recipe(seed=args.seed, two_hops=True)
        else:
            shape, recipe = Shape(), Recipe(seed=args.seed)
        run_training(texts, args.minutes, args.model, shape, recipe)
    served = 0 if args.no_server else args.served
    if args.command == "documents":
        scale = 10 if args.quick else 1
        result = documents.measure(args.model, args.texts // scale, args.chains // scale)
        write(result, args.json)
        document_report.draw(result, args.plot)
        print(document_report.tables(result))
    elif args.command == "codecs":
        many = Settings(documents=args.documents, stored=STORED[args.stored])
        result = measure_codecs(args.model, many, served=served)
        write(result, args.json)
        print(codec_tables(result))
    elif args.command == "codecs-served":  # beside what was measured without one
        result = json.loads(args.json.read_text(encoding="utf-8"))
        result["served"] = measure_servers(args.model, args.served)
        write(result, args.json)
        print(codec_tables(result))
    elif args.command != "train":
        many = args.documents
        settings = Settings(
            documents=many,
            recall_documents=many,
            curve_documents=max(1, many // 2),
            stored=STORED[args.stored],
        )
        run_evaluation(args.model, settings, args.json, args.plot, served=served)


if __name__ == "__main__":
    main()
