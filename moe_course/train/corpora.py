"""Documents of four domains, read from packages that are already installed.

Nothing is fetched and no package code is imported: files are found through their package's metadata,
checked against a SHA-256, and parsed. Each domain has a preferred source and, where there is one, a
fallback; a source that is missing or has changed is passed over with a line in :attr:`Source.notes`.

=======  =======================================================  =====================================
domain   preferred source                                         fallback
=======  =======================================================  =====================================
code     the running Python's standard library                    sources of numpy and jax
text     gensim's sample of the English Wikipedia                 pydoc topics and docstrings
protein  promb's copy of human UniProtKB/Swiss-Prot               pyhmmer's *Anaerococcus* proteome
dna      pyrodigal's genome of *Corynebacterium diphtheriae*      pyhmmer's *Bacillus* contig
=======  =======================================================  =====================================
"""

import bz2
import difflib
import gzip
import hashlib
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from moe_course.errors import SettingError
from moe_course.train.readers import (
    docstrings,
    documentation_share,
    parse_fasta,
    pydoc_topics,
    python_files,
)
from moe_course.train.wikitext import clean_dump

DOMAINS = ("code", "text", "protein", "dna")
"""Every domain. The index of a domain is its id, in batches and in its domain token."""
DNA_DOCUMENT = 8192
"""Bases in one DNA document: a contig is cut into runs of this length."""
_MIN_CODE_BYTES = 1_000_000
"""Less than this and the standard library counts as shipped without sources."""
_MIN_DOCUMENTATION = 0.25
"""Share of docstrings in a module that makes it a document of the fallback for English."""


@dataclass(frozen=True)
class Document:
    """One file, article, sequence or stretch of a contig, as bytes."""

    name: str
    """Path, title or accession. It decides the split, so one name means one split in every domain."""
    domain: str
    data: bytes


@dataclass(frozen=True)
class Source:
    """The documents of one domain and where they came from."""

    domain: str
    description: str
    """What it is, with version."""
    licence: str
    """Licence of the content, with the attribution it asks for."""
    documents: tuple[Document, ...]
    """No two with the same bytes. In order of position where ``contiguous``."""
    contiguous: bool = False
    """The documents are consecutive pieces of one sequence, so a random split would leak."""
    notes: tuple[str, ...] = ()
    """Why better sources were passed over."""

    @cached_property
    def sha256(self) -> str:
        """Of every name and its bytes, in order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.name}\0{len(document.data)}\0".encode())
            digest.update(document.data)
        return digest.hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        return sum(len(document.data) for document in self.documents)

    def describe(self) -> dict:
        """What a report needs, as JSON types."""
        return {
            "domain": self.domain,
            "description": self.description,
            "licence": self.licence,
            "documents": len(self.documents),
            "bytes": self.num_bytes,
            "sha256": self.sha256,
            "notes": list(self.notes),
        }


class UnusableError(Exception):
    """A source cannot be used here; the message is the reason."""


@cache
def load_domain(domain: str) -> Source:
    """The best source of ``domain`` that is installed and unchanged; kept in memory once read.

    Raises :class:`SettingError` for an unknown domain and for one without any source here.
    """
    check_domain(domain)
    reasons = []
    cure = "" if domain == "code" else " (pip install 'moe-course[data]' brings the preferred source)"
    for read in _SOURCES[domain]:
        try:
            source = read()
        except UnusableError as reason:
            reasons.append(str(reason))
        else:
            return replace(source, notes=tuple(f"{domain} falls back: {reason}{cure}" for reason in reasons))
    raise SettingError(
        f"there is no source for domain {domain}: {'; '.join(reasons)}. "
        f"Install the data extra (pip install 'moe-course[data]'), or leave {domain} out of --data.domains."
    )


def available_domains() -> tuple[str, ...]:
    """The domains that have a source here, in the order of :data:`DOMAINS`."""

    def is_available(domain: str) -> bool:
        try:
            load_domain(domain)
        except SettingError:
            return False
        return True

    return tuple(filter(is_available, DOMAINS))


def check_domain(domain: str) -> None:
    """Raise :class:`SettingError`, with the nearest known name, unless ``domain`` is known."""
    if domain not in DOMAINS:
        near = difflib.get_close_matches(domain.lower(), DOMAINS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise SettingError(
            f"unknown domain {domain!r}. {hint}Set --data.domains to some of: {' '.join(DOMAINS)}."
        )


# Finding files


def package_path(package: str, path: str) -> Path:
    """Where the installed distribution ``package`` has ``path``; the package is not imported."""
    try:
        return Path(distribution(package).locate_file(path))
    except PackageNotFoundError:
        raise UnusableError(f"{package} is not installed") from None


def stdlib_path() -> Path:
    """The directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _package_version(package: str) -> str:
    return f"{package} {distribution(package).version}"


@dataclass(frozen=True)
class PackagedFile:
    """A data file inside a wheel. It is nobody's interface, so its content is pinned by hash."""

    package: str
    path: str
    sha256: str

    def read(self) -> bytes:
        """The decompressed content. Raises :class:`UnusableError` when it is missing or has changed."""
        path = package_path(self.package, self.path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UnusableError(f"{self.package} has no readable {path.name} ({error.strerror})") from None
        found = hashlib.sha256(raw).hexdigest()
        if found != self.sha256:
            raise UnusableError(
                f"{path.name} of {self.package} has changed "
                f"(SHA-256 {found[:12]}, expected {self.sha256[:12]})"
            )
        decompress = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
        return decompress(raw)


HUMAN_PROTEINS = PackagedFile(
    "promb",
    "promb/resources/uniprot_sprot_human.fasta.gz",
    "abc81cfdb1b21a85ccc9fc7a7aeea711018dcf203f47cb178b33a9eb014b66ae",
)
ANAEROCOCCUS_PROTEINS = PackagedFile(
    "pyhmmer",
    "pyhmmer/tests/data/seqs/938293.PRJEB85.HG003687.faa",
    "7190c967978a9921f69dadc710db2d826b41ec738894bf51c1d439106d0a4a08",
)
CORYNEBACTERIUM_GENOME = PackagedFile(
    "pyrodigal",
    "pyrodigal/tests/data/GCF_001457455.1_NCTC11397_genomic.fna.gz",
    "e9f88cc1a5c1f0e10f372df91852e44630cbeb1d424a34566ed159e5e94850b3",
)
BACILLUS_CONTIG = PackagedFile(
    "pyhmmer",
    "pyhmmer/tests/data/seqs/1390.SAMEA104415756.OFHT01000022.fna",
    "b61f5460aa8a03ca0561c5261aec6d3f85469bdc7ce2c96699ac793512b67329",
)
WIKIPEDIA_SAMPLE = PackagedFile(
    "gensim",
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)


# Reading them


def unique_documents(domain: str, named: Iterable[tuple[str, bytes]]) -> tuple[Document, ...]:
    """The non-blank ones, without exact duplicates: the first of each stays."""
    seen: set[bytes] = set()
    documents = []
    for name, data in named:
        digest = hashlib.sha256(data).digest()
        if data.strip() and digest not in seen:
            seen.add(digest)
            documents.append(Document(name, domain, data))
    return tuple(documents)


def _stdlib_code() -> Source:
    documents = unique_documents("code", python_files(stdlib_path()))
    python = f"Python {platform.python_version()}"
    if sum(len(document.data) for document in documents) < _MIN_CODE_BYTES:
        raise UnusableError(f"{python} comes without the sources of its standard library")
    return Source("code", f"standard library of {python}", "PSF-2.0", documents)


def _package_files() -> Iterator[tuple[str, bytes]]:
    for package in ("numpy", "jax"):
        for name, data in python_files(package_path(package, package)):
            yield f"{package}/{name}", data


def _package_code() -> Source:
    versions = f"{_package_version('numpy')} and {_package_version('jax')}"
    licence = "BSD-3-Clause (numpy), Apache-2.0 (jax)"
    return Source("code", f"sources of {versions}", licence, unique_documents("code", _package_files()))


def _wikipedia() -> Source:
    articles = clean_dump(WIKIPEDIA_SAMPLE.read().decode())
    description = f"English Wikipedia, 2016 sample in {_package_version('gensim')}"
    return Source("text", description, "CC BY-SA, Wikipedia authors", unique_documents("text", articles))


def _documentation() -> Source:
    """Docstrings, one document per module, and the language reference that ``help()`` shows.

    Only modules rich in documentation are parsed, which keeps two thirds of the text for a third of the
    time. A document has the name of its file, so it is held out exactly when that file's code is.
    """
    seen: set[str] = set()

    def texts() -> Iterator[tuple[str, bytes]]:
        yield from pydoc_topics(stdlib_path())
        for name, data in (*python_files(stdlib_path()), *_package_files()):
            if documentation_share(data) >= _MIN_DOCUMENTATION:
                new = [text for text in dict.fromkeys(docstrings(data)) if text not in seen]
                seen.update(new)
                yield name, "\n\n".join(new).encode("utf-8", "replace")

    versions = f"Python {platform.python_version()}, {_package_version('numpy')}, {_package_version('jax')}"
    licence = "PSF-2.0 (Python), BSD-3-Clause (numpy), Apache-2.0 (jax)"
    return Source("text", f"documentation of {versions}", licence, unique_documents("text", texts()))


def _proteins(file: PackagedFile, what: str, licence: str) -> Source:
    documents = unique_documents("protein", parse_fasta(file.read()))
    return Source("protein", f"{what} in {_package_version(file.package)}", licence, documents)


def _contig(file: PackagedFile, what: str, licence: str) -> Source:
    """Consecutive documents of one contig (each of :data:`DNA_DOCUMENT` bases)."""
    [(name, bases)] = parse_fasta(file.read())
    pieces = (
        (f"{name}:{start}", bases[start : start + DNA_DOCUMENT])
        for start in range(0, len(bases), DNA_DOCUMENT)
    )
    description = f"{what} in {_package_version(file.package)}"
    return Source("dna", description, licence, unique_documents("dna", pieces), contiguous=True)


_SOURCES: dict[str, tuple[Callable[[], Source], ...]] = {
    "code": (_stdlib_code, _package_code),
    "text": (_wikipedia, _documentation),
    "protein": (
        lambda: _proteins(HUMAN_PROTEINS, "human UniProtKB/Swiss-Prot", "CC BY 4.0, UniProt Consortium"),
        lambda: _proteins(ANAEROCOCCUS_PROTEINS, "Anaerococcus proteome", "MIT"),
    ),
    "dna": (
        lambda: _contig(CORYNEBACTERIUM_GENOME, "Corynebacterium diphtheriae NCTC11397", "NCBI RefSeq"),
        lambda: _contig(BACILLUS_CONTIG, "Bacillus contig", "MIT"),
    ),
}
"""Readers of each domain's sources, best first."""
