"""Documents per domain: parsers, traps of the formats, and sources that are missing or changed."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from moe_course.errors import SettingError
from moe_course.train import corpora
from moe_course.train.readers import docstrings, documentation_share, parse_fasta, pydoc_topics, python_files
from moe_course.train.wikitext import clean_dump, clean_page


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


needs_gensim = pytest.mark.skipif(not _is_installed("gensim"), reason="needs the data extra (gensim)")
needs_promb = pytest.mark.skipif(not _is_installed("promb"), reason="needs the data extra (promb)")
needs_pyrodigal = pytest.mark.skipif(
    not _is_installed("pyrodigal"), reason="needs the data extra (pyrodigal)"
)


@pytest.fixture
def uncached():
    corpora.load_domain.cache_clear()
    yield
    corpora.load_domain.cache_clear()


@pytest.fixture
def small_python(tmp_path, monkeypatch, uncached):
    """A standard library and a numpy and jax of a few lines, and none of the data extra."""
    files = {
        "stdlib/queue.py": '"""A queue of things."""\nx = 1\n',
        "stdlib/pydoc_data/topics.py": 'topics = {"if": "The if statement.", "for": "The for loop."}\n',
        "numpy/core.py": '"""Arrays of numbers."""\n\ndef f():\n    """A queue of things."""\n',
        "jax/api.py": '"""Transformations of functions."""\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def package_path(package, path):
        if package not in ("numpy", "jax"):
            raise corpora.UnusableError(f"{package} is not installed")
        return tmp_path / path

    monkeypatch.setattr(corpora, "stdlib_path", lambda: tmp_path / "stdlib")
    monkeypatch.setattr(corpora, "package_path", package_path)
    return tmp_path


# FASTA


FASTA_TRAPS = {
    "a sign in the header": (b">A 3'->5' exo\nMK\n>B x\nLV\n", [("A", b"MK"), ("B", b"LV")]),
    "a sign that starts a word": (b">A >B >C\nMK\n", [("A", b"MK")]),
    "CRLF": (b">A x\r\nMK\r\nLV\r\n", [("A", b"MKLV")]),
    "old Mac line ends": (b">A x\rMK\rLV", [("A", b"MKLV")]),
    "lower case": (b">A\nmkLv\n", [("A", b"MKLV")]),
    "blank lines and spaces": (b"\n>A\n\nMK LV\n \nAA\n", [("A", b"MKLVAA")]),
    "an empty record": (b">A\n>B\nMK\n>C", [("A", b""), ("B", b"MK"), ("C", b"")]),
    "no line end at the end": (b">A\nMK", [("A", b"MK")]),
    "a stop": (b">A\nMK*\n", [("A", b"MK")]),
    "no name": (b">\nMK\n", [("unnamed", b"MK")]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("trap", FASTA_TRAPS)
def test_fasta(trap):
    data, records = FASTA_TRAPS[trap]
    assert list(parse_fasta(data)) == records


def test_fasta_traps_catch_splitting_on_the_sign():
    def wrong(data):
        records = (piece.partition(b"\n") for piece in data.split(b">")[1:])
        return [(head.split()[0].decode(), body.replace(b"\n", b"")) for head, _, body in records]

    data, records = FASTA_TRAPS["a sign in the header"]
    assert wrong(data.replace(b"->", b"-")) == records
    assert wrong(data) != records


def test_fasta_refuses_sequence_without_header():
    with pytest.raises(ValueError, match="not FASTA"):
        list(parse_fasta(b"MKLV\n>A\nMK\n"))


# Python sources


def test_python_files_drops_tests_tables_and_foreign_packages(tmp_path):
    kept = {"a.py": b"x\n", "json/decoder.py": b"y\n", "unittest/mock.py": b"z\n"}
    dropped = (
        *("site-packages/a.py", "lib/dist-packages/a.py", "test/a.py", "tests/a.py", "json/tests/a.py"),
        *("test_a.py", "idlelib/idle_test/a.py", "encodings/cp37.py", "pydoc_data/topics.py", "lib2to3/a.py"),
        *("_sysconfigdata__linux.py", "config-3.11-x86_64/python-config.py", "a.txt", "__pycache__/a.py"),
    )
    for name, data in {**kept, **dict.fromkeys(dropped, b"no\n")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data.replace(b"\n", b"\r\n"))
    assert dict(python_files(tmp_path)) == kept
    assert list(dict(python_files(tmp_path))) == sorted(kept)


def test_docstrings_in_order_without_running_the_source():
    source = rb'''"""Module \d."""
import nothing_like_this
raise SystemExit
try:
    def f():
        """
        Function.

            Indented.
        """
        "not a docstring"
except ImportError:
    def g(): "Handler."
else:
    class C:
        """Class."""
        async def m(self):
            """Method."""
'''
    assert list(docstrings(source)) == [
        "Module \\d.",
        "Function.\n\n    Indented.",
        "Handler.",
        "Class.",
        "Method.",
    ]


@pytest.mark.parametrize(
    ("source", "share"),
    [
        (b'"""abcdefgh"""\n' + b"x" * 17, 8 / 32),
        (b"def f():\n    r'''abc'''\n", 3 / 24),
        (b'x = """data"""\n', 0),
        (b"", 0),
    ],
)
def test_share_of_documentation(source, share):
    assert documentation_share(source) == share


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"print 'two'\n", b"\x00", b"\xff\xfe", b"x = " + b"(" * 5000]
)
def test_no_docstrings_where_python_cannot_parse(source):
    assert list(docstrings(source)) == []


def test_exact_duplicates_and_blank_files_go():
    named = [("a", b"x = 1"), ("b", b""), ("c", b" \n"), ("d", b"x = 1"), ("e", b"y")]
    assert [document.name for document in corpora.unique_documents("code", named)] == ["a", "e"]


# Wikitext

WIKITEXT = {
    "link": ("a [[dog]] and [[Cat|cats]]", "a dog and cats"),
    "picture with links": ("x [[File:a.jpg|thumb|A [[dog]] [http://a.b c]]] y", "x y"),
    "category and language": ("x[[Category:Dogs]][[fr:Chien]]", "x"),
    "reference": ('a.<ref name="b">c [[d]]</ref> e.<ref name="b"/>', "a. e."),
    "nested template": ("a {{b|{{c}}|d}} e", "a e"),
    "table": ("a\n{|\n| b || {{c}}\n|}\nd", "a\nd"),
    "measure": ("It is {{convert|5|km|mi|abbr=on}} long", "It is 5 km long"),
    "foreign word": ("or {{lang|fr|chien}}", "or chien"),
    "lists and headings": ("== A ==\n* b\n# c\n: d\n; e\nf", "f"),
    "quotes": ("'''Bold''' and ''italic'' isn't", "Bold and italic isn't"),
    "web link": ("see [http://a.b/c?d=e the page]", "see the page"),
    "comment and tags": ("a<!-- b --> <b>c</b> H<sub>2</sub>O<br />", "a c H2O"),
    "pronunciation": ("Anna ({{IPA|x}}; born 1900) said ({{IPA|y}}) f(x)", "Anna (born 1900) said f(x)"),
    "entity": ("AT&amp;T&nbsp;x", "AT&T x"),
    "unbalanced": ("a {{b [[c", "a {{b [[c"),
}


@pytest.mark.parametrize("case", WIKITEXT)
def test_wikitext(case):
    markup, prose = WIKITEXT[case]
    assert clean_page(markup) == prose


def test_dump_keeps_articles_with_prose():
    pages = {
        "Dog &amp; cat": "Dogs &lt;br&gt; bark. " * 50,
        "Old": "#REDIRECT [[Dog]]" + " x" * 500,
        "Stub": "Short.",
    }
    xml = "".join(f"<page><title>{t}</title><text xml:space='a'>{x}</text></page>" for t, x in pages.items())
    [(title, text)] = clean_dump(xml)
    assert title == "Dog & cat"
    assert text.startswith(b"Dogs bark. Dogs")


# Sources that are here


def _check_source(source: corpora.Source):
    assert source.notes == ()
    assert len({document.name for document in source.documents}) == len(source.documents)
    assert len({hashlib.sha256(document.data).digest() for document in source.documents}) == len(
        source.documents
    )
    assert all(document.data.strip() and document.domain == source.domain for document in source.documents)


def test_code_is_the_standard_library():
    source = corpora.load_domain("code")
    _check_source(source)
    assert 7e6 < source.num_bytes < 13e6
    names = {document.name for document in source.documents}
    assert {"ast.py", "asyncio/events.py", "unittest/mock.py"} <= names
    assert not any(part.startswith("test") for name in names for part in name.split("/"))
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}." in source.description
    assert set(source.describe()) >= {"description", "licence", "documents", "bytes", "sha256", "notes"}


@needs_gensim
def test_text_is_wikipedia():
    source = corpora.load_domain("text")
    _check_source(source)
    text = b"\n".join(document.data for document in source.documents)
    assert len(source.documents) == 96
    assert 2.5e6 < len(text) < 2.6e6
    assert text.count(b"[[") + text.count(b"{{") + text.count(b"</") + text.count(b"http") < 10
    assert text.count(b" the ") / len(text.split()) > 0.05


@needs_promb
def test_protein_is_human_swiss_prot():
    source = corpora.load_domain("protein")
    _check_source(source)
    assert len(source.documents) == 20_340
    assert set(b"".join(document.data for document in source.documents)) == set(b"ACDEFGHIKLMNPQRSTUVWY")
    assert len(list(parse_fasta(corpora.HUMAN_PROTEINS.read()))) == 20_417
    assert corpora.HUMAN_PROTEINS.read().count(b">") == 20_429  # the trap is in the file


@needs_pyrodigal
def test_dna_is_one_contig_in_order():
    source = corpora.load_domain("dna")
    _check_source(source)
    assert source.contiguous
    [(_, contig)] = parse_fasta(corpora.CORYNEBACTERIUM_GENOME.read())
    assert b"".join(document.data for document in source.documents) == contig
    assert len(contig) == 2_463_666


def test_content_hash_sees_names_borders_and_order():
    def source(*named):
        documents = tuple(corpora.Document(name, "code", data) for name, data in named)
        return corpora.Source("code", "", "", documents).sha256

    hashes = [
        source(("a", b"x"), ("b", b"y")),
        source(("b", b"y"), ("a", b"x")),
        source(("a", b"xy")),
        source(("a", b"x"), ("c", b"y")),
        source(("a", b"xb\x001\x00y")),
    ]
    assert len(set(hashes)) == len(hashes)


# Sources that are not


def test_without_the_data_extra_code_and_documentation_are_left(small_python, monkeypatch):
    monkeypatch.setattr(corpora, "_MIN_CODE_BYTES", 1)
    assert corpora.available_domains() == ("code", "text")
    text = corpora.load_domain("text")
    [note] = text.notes
    assert note.startswith("text falls back: gensim is not installed (pip install 'moe-course[data]'")
    assert {document.name: document.data for document in text.documents} == {
        "pydoc_data/topics.py:if": b"The if statement.",
        "pydoc_data/topics.py:for": b"The for loop.",
        "queue.py": b"A queue of things.",
        "numpy/core.py": b"Arrays of numbers.",  # the same docstring in two modules stays once
        "jax/api.py": b"Transformations of functions.",
    }
    code = {document.name for document in corpora.load_domain("code").documents}
    assert code <= {document.name for document in text.documents}  # so a file's code and text share a split
    for domain in ("protein", "dna"):
        with pytest.raises(SettingError, match=r"not installed.*moe-course\[data\].*--data.domains"):
            corpora.load_domain(domain)


def test_a_standard_library_without_sources_falls_back(small_python):
    source = corpora.load_domain("code")
    assert "numpy" in source.description
    assert [document.name for document in source.documents] == ["numpy/core.py", "jax/api.py"]
    [note] = source.notes
    assert note.startswith("code falls back: Python")
    assert "without the sources" in note


@needs_gensim
def test_a_changed_file_falls_back(small_python, monkeypatch):
    monkeypatch.setattr(corpora, "package_path", lambda package, path: small_python / path)
    for file in (corpora.WIKIPEDIA_SAMPLE, corpora.HUMAN_PROTEINS):
        (small_python / file.path).parent.mkdir(parents=True, exist_ok=True)
        (small_python / file.path).write_bytes(b"changed")
    [note] = corpora.load_domain("text").notes
    assert note.startswith("text falls back: enwiki")
    assert "has changed (SHA-256 " in note
    with pytest.raises(SettingError, match=r"uniprot_sprot_human\.fasta\.gz of promb has changed"):
        corpora.load_domain("protein")
    with pytest.raises(SettingError, match="has no readable GCF_001457455"):
        corpora.load_domain("dna")


@needs_pyrodigal
def test_an_intact_file_with_another_expected_hash_is_refused():
    wrong = replace(corpora.CORYNEBACTERIUM_GENOME, sha256="0" * 64)
    with pytest.raises(corpora.UnusableError, match="expected 000000000000"):
        wrong.read()
    assert corpora.CORYNEBACTERIUM_GENOME.read()


@pytest.mark.parametrize(
    ("name", "hint"), [("protien", "Did you mean protein"), ("Code", "Did you mean code"), ("music", "")]
)
def test_unknown_domain(name, hint):
    with pytest.raises(SettingError) as error:
        corpora.load_domain(name)
    assert f"unknown domain '{name}'. {hint}" in str(error.value)
    assert "Set --data.domains to some of: code text protein dna." in str(error.value)
    assert ("Did you mean" in str(error.value)) == bool(hint)


def test_topics_are_found_in_this_python():
    topics = dict(pydoc_topics(corpora.stdlib_path()))
    assert len(topics) > 50
    assert b"with" in topics["pydoc_data/topics.py:with"]


def test_documentation_of_the_installed_packages():
    source = corpora._documentation()
    _check_source(source)
    assert 3e6 < source.num_bytes < 7e6
    text = b"\n".join(document.data for document in source.documents)
    assert text.count(b" the ") / len(text.split()) > 0.03


def test_no_package_code_and_no_jax_is_imported():
    program = (
        "import sys; from moe_course.train import corpora\n"
        "for domain in corpora.available_domains(): corpora.load_domain(domain)\n"
        "print(sorted({'jax', 'numpy', 'gensim', 'promb', 'pyrodigal'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
