"""sentence-transformers in its own process and environment, where there is no onehead: the vectors
of texts and how long they take.

    python bench/real/sentences.py FOLDER REQUEST.json VECTORS.npy

REQUEST is one JSON object: `texts`, `threads`, and the sizes of `batches`, each of which is timed.
Prints one JSON object, texts a second by size, and writes the vectors that the last size gave.
"""

import json
import sys
import time

import numpy as np
import torch
from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]


def main() -> None:
    folder, request, output = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        given = json.load(file)
    torch.set_num_threads(given["threads"])
    options = {"dtype": torch.float32}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=options)
    texts, speeds = given["texts"], {}
    model.encode(texts[:2])
    for size in given["batches"]:
        began = time.perf_counter()
        vectors = model.encode(texts, batch_size=size)
        speeds[str(size)] = len(texts) / (time.perf_counter() - began)
    np.save(output, vectors)
    print(json.dumps(speeds))


main()
