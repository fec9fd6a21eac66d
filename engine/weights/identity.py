"""Which weights a model file holds, told by little reading: the same file elsewhere is the same, another never is."""

from __future__ import annotations

import hashlib
from pathlib import Path

HEAD_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096


def weights_identity(path: Path) -> str:
    """Hex digest over names, sizes, beginnings and samples of a GGUF file, or of a folder's config and safetensors.

    Names and shapes stand at the beginning; the samples, spread evenly, tell models of the same shape apart. Neither
    times nor the folder's own name take part, so a copied or moved model keeps its identity. Reads at most 1.25 MiB of
    each file.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else [path / "config.json", *sorted(path.glob("*.safetensors"))]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if file == path else file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(HEAD_BYTES))
            for index in range(SAMPLES) if size > HEAD_BYTES else ():
                stream.seek(HEAD_BYTES + (size - HEAD_BYTES) * index // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
