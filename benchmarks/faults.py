"""Faults injected for real, and what survives them: Cordee beside DCP, Hugging Face's Trainer and Lightning.

Each run draws when and where from its seed. Survived: started again, the job goes on by itself to its end, and from a
state that was really there. Steps lost: done twice, the most of all runs. Wrong: something was loaded that nobody had
saved. A run that does not survive, of ours, prints the line that replays it.

    python benchmarks/faults.py [--times 20] [--peers 3] [--only 1,4,9] [--products cordee,DCP] [--seed 1] [--json]
"""

import argparse
import json
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "CORDEE_QUIET": "1"}
warnings.simplefilter("ignore")

import faults_more  # noqa: E402, F401 - the environment has to be set before torch is read
from faults_products import PRODUCTS, missing  # noqa: E402
from faults_scenes import SCENES, Scene  # noqa: E402
from faults_world import NotRun, Outcome, Run  # noqa: E402


def play(scene: Scene, product: str, seed: int, folder: Path) -> Outcome | str:
    """One run of one scene; a text says why there is none."""
    run = Run(PRODUCTS[product], product, folder, seed * 1000 + scene.number, scene.ranks)
    try:
        return scene.play(run)
    except NotRun as reason:
        return str(reason)
    except Exception as error:
        print(run.logs()[-4000:], file=sys.stderr)
        traceback.print_exc()
        return Outcome(False, None, False, f"the scene failed: {error!r}"[:300])
    finally:
        run.end()


def replay(scene: Scene, product: str, seed: int) -> str:
    """The line that plays this run again."""
    here = shlex.quote(os.path.relpath(__file__))
    return f"python {here} --only {scene.number} --products {product} --seed {seed} --times 1 --peers 1 --keep-folder"


def row(which: tuple[int, str], args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one scene on one product."""
    scene, product = SCENES[which[0]], which[1]
    found: list[Outcome] = []
    started_s = time.monotonic()
    told: dict[str, Any] = {"fault": scene.number, "name": scene.name, "product": product}
    for seed in range(args.seed, args.seed + (args.times if product == "cordee" else args.peers)):
        folder = Path(tempfile.mkdtemp(prefix=f"{scene.number}-{product}-{seed}-", dir=args.folder))
        outcome = play(scene, product, seed, folder)
        if not args.keep_folder:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(outcome, str):
            return {**told, "runs": 0, "reason": outcome}
        found.append(outcome)
        if not outcome.survived:
            print(f"    {product}, seed {seed}: {outcome.note}", file=sys.stderr, flush=True)
            if product == "cordee":
                print(f"    replay: {replay(scene, product, seed)}", file=sys.stderr, flush=True)
    lost = [each.lost for each in found if each.lost is not None]
    notes = sorted({each.note for each in found if each.note})
    return {
        **told,
        "runs": len(found),
        "survived": sum(each.survived for each in found),
        "steps_lost_max": max(lost, default=None),
        "wrong": sum(each.wrong for each in found),
        "notes": notes[:3],
        "took_s": round(time.monotonic() - started_s, 1),
    }


def show(rows: list[dict[str, Any]], products: list[str]) -> None:
    """One line a fault, one column a product: survived of runs, most steps lost, wrong loads."""
    by = {(each["fault"], each["product"]): each for each in rows}
    print(f"{'':67}" + "".join(f"{product:>22}" for product in products))
    for number in sorted({each["fault"] for each in rows}):
        cells = []
        for product in products:
            each = by.get((number, product))
            if each is None or not each["runs"]:
                cells.append("-")
                continue
            lost = "?" if each["steps_lost_max"] is None else each["steps_lost_max"]
            wrong = f", {each['wrong']} WRONG" if each["wrong"] else ""
            cells.append(f"{each['survived']}/{each['runs']}, {lost} lost{wrong}")
        print(f"{number:3} {SCENES[number].name:63}" + "".join(f"{cell:>22}" for cell in cells))
    print("\nsurvived/runs, the most steps lost in a run, runs that loaded what nobody had saved")
    for each in rows:
        if not each["runs"]:
            print(f"{each['fault']:3} {each['product']}: not run: {each['reason']}")


def main() -> int:
    """Play, print a table or with --json one object; 1 if ours did not survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="runs of each fault on Cordee")
    parser.add_argument("--peers", type=int, default=3, help="runs of each fault on the others; 0: none")
    parser.add_argument("--only", type=lambda text: [int(each) for each in text.split(",")], default=sorted(SCENES))
    parser.add_argument("--products", type=lambda text: text.split(","), default=list(PRODUCTS))
    parser.add_argument("--jobs", type=int, default=2, help="played at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=lambda text: Path(text).absolute())
    parser.add_argument("--keep-folder", action="store_true", help="of each run, to look at")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    products = [each for each in args.products if each == "cordee" or args.peers]
    absent = {product: why for product in products if (why := missing(product))}
    products = [product for product in products if product not in absent]
    todo = [(number, product) for number in args.only for product in products if product in SCENES[number].products]
    rows = []
    # Forked while this process has one thread; each plays one fault on one product at a time.
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for done in pool.imap(partial(row, args=args), todo):
            rows.append(done)
            kept = {name: done[name] for name in ("survived", "runs", "wrong", "took_s") if name in done}
            print(f"{done['fault']:3} {done['name']}: {done['product']} {kept}", file=sys.stderr, flush=True)
    for product, why in absent.items():
        print(f"{product}: {why}", file=sys.stderr)
    print(json.dumps(rows)) if args.json else show(rows, products)
    return int(any(each["product"] == "cordee" and each.get("survived", 0) < each["runs"] for each in rows))


if __name__ == "__main__":
    sys.exit(main())
