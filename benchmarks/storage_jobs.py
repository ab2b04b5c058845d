"""One job of `storage.py`: reads one epoch of the dataset in batches of 64, and prints what it took as JSON."""

import argparse
import hashlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
IMPORTS = {
    "cordee": ("torch.utils.data", "cordee.train.data.sampler", "cordee.storage.cache.api"),
    "streaming": ("torch.utils.data", "streaming"),
    "webdataset": ("torch.utils.data", "webdataset"),
    "datasets": ("torch.utils.data", "datasets", "s3fs"),
}


def cordee(url: str, cache: Path, seed: int) -> tuple[Iterator[list[int]], Callable[[], None]]:
    from torch.utils.data import DataLoader

    from cordee import ElasticBatchSampler, data

    samples = data(f"{url}/mds", cache=cache).samples(decode=lambda sample: (sample["id"], len(sample["x"])))
    sampler = ElasticBatchSampler(samples, BATCH, seed=seed, dp=(0, 1), drop_last=False)
    batches = sampler.batches(DataLoader(samples, batch_sampler=sampler, collate_fn=list))
    return _take(batches, sampler.steps_in(1)), samples.close


def streaming(url: str, cache: Path, seed: int) -> tuple[Iterator[list[int]], Callable[[], None]]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(
        remote=f"{url}/mds", local=str(cache), shuffle=True, shuffle_seed=seed, batch_size=BATCH, num_canonical_nodes=1
    )
    loader = DataLoader(dataset, batch_size=BATCH, collate_fn=lambda found: [(s["id"], len(s["x"])) for s in found])
    return iter(loader), lambda: None


def webdataset(url: str, cache: Path, seed: int) -> tuple[Iterator[list[int]], Callable[[], None]]:
    import webdataset

    cache.mkdir(exist_ok=True)
    base = f"{os.environ['AWS_ENDPOINT_URL']}/{url.partition('://')[2]}/tar"
    urls = [f"{base}/{number:05}.tar" for number in range(int(os.environ["BENCH_SHARDS"]))]
    found = webdataset.WebDataset(urls, cache_dir=str(cache), shardshuffle=len(urls), seed=seed).shuffle(1000)
    pairs = found.map(lambda sample: (int(sample["__key__"]), len(sample["x"]))).batched(BATCH, collation_fn=list)
    return iter(pairs), lambda: None


def datasets(url: str, cache: Path, seed: int) -> tuple[Iterator[list[int]], Callable[[], None]]:
    import datasets  # its cache is in HF_HOME

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "key": "key", "secret": "secret"}
    found = datasets.load_dataset(
        "parquet", data_files=f"{url}/parquet/*.parquet", split="train", storage_options=options
    )
    batches = found.shuffle(seed=seed).iter(batch_size=BATCH)
    return ([*zip(each["id"], map(len, each["x"]), strict=True)] for each in batches), lambda: None


def _take(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        yield next(batches)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    for module in IMPORTS[given.way]:  # which a trainer has anyway
        importlib.import_module(module)
    began_s, cpu_began_s = time.monotonic(), _cpu_s()
    batches, close = globals()[given.way](given.url, given.cache, given.seed)
    first_s, ids, n_bytes = None, [], 0
    for batch in batches:
        first_s = first_s or time.monotonic() - began_s
        ids += [each for each, _ in batch]
        n_bytes += sum(size for _, size in batch)
    total_s = time.monotonic() - began_s
    close()
    order = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
    found = {"first_s": first_s, "total_s": total_s, "cpu_s": _cpu_s() - cpu_began_s, "samples": len(ids)}
    found |= {"distinct": len(set(ids)), "bytes": n_bytes, "order": order, "imports_cpu_s": cpu_began_s}
    found |= {"children_cpu_s": _cpu_s(resource.RUSAGE_CHILDREN)}
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some leave threads


def _cpu_s(*of: int) -> float:
    used = [resource.getrusage(who) for who in of or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
