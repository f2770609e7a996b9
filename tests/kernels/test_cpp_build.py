"""Compiling the C++ kernels: once, whole or not at all, and never required."""

import logging
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minipaged.kernels.cpp import build
from minipaged.kernels.cpp.build import BuildError, cache_directory, find_compiler, load_library
from minipaged.kernels.dispatch import select_backend
from minipaged.kernels.reference.attention import paged_attention

try:
    BUILT = load_library()._name
except BuildError as reason:
    unavailable: str | None = str(reason)
else:
    unavailable = None
needs_compiler = pytest.mark.skipif(unavailable is not None, reason=f"C++ kernels: {unavailable}")


@pytest.fixture(autouse=True)
def nothing_built_yet(tmp_path, monkeypatch):
    """An empty cache directory, and no library remembered from other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def library_path():
    """Where the library belongs, with OpenMP."""
    return build.library_path(find_compiler(), (*build.FLAGS, build.processor_flag(), *build.openmp_flags()))


def files_of(path):
    return [path.with_suffix(".sha256").name, path.name]


def files():
    return sorted(path.name for path in cache_directory().iterdir())


def fake_compiler(tmp_path, script):
    compiler = tmp_path / "fake-c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch):
    """One that takes no seconds: what it writes is a copy of the library that the real one has built."""
    script = f'for last; do :; done; [ "$1" = --version ] || cp {shlex.quote(BUILT)} "$last"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))


@needs_compiler
def test_the_second_load_compiles_nothing(quick_compiler):
    """Catches seconds of compilation at every start, and leftovers beside the library."""
    load_library()
    path = library_path()
    assert files() == files_of(path)
    load_library.cache_clear()
    built_at = path.stat().st_mtime_ns
    load_library()
    assert path.stat().st_mtime_ns == built_at


@needs_compiler
@pytest.mark.parametrize("changed", ["SOURCES", "HEADERS", "FLAGS", "_processor"])
def test_whatever_shapes_the_library_is_in_its_name(changed, tmp_path, monkeypatch):
    """Catches a stale library after an edit, and one for another processor's instructions (a crash)."""
    before = library_path()
    if changed in ("SOURCES", "HEADERS"):
        files = getattr(build, changed)
        edited = tmp_path / files[-1].name
        edited.write_text(files[-1].read_text() + "// edited\n")
        monkeypatch.setattr(build, changed, [*files[:-1], edited])
    else:
        value = (*build.FLAGS, "-g") if changed == "FLAGS" else lambda: "another processor"
        monkeypatch.setattr(build, changed, value)
    assert library_path() != before


@pytest.mark.slow
@needs_compiler
def test_builds_at_the_same_time_do_not_disturb_each_other():
    """Catches a process that loads what another one has written half."""
    command = (
        "import torch; from minipaged.kernels.cpp.build import load_library; load_library().write_tokens"
    )
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda _: subprocess.run([sys.executable, "-c", command], check=False), range(2))
        assert [run.returncode for run in runs] == [0, 0]
    assert files() == files_of(library_path())


@needs_compiler
def test_auto_picks_cpp_on_a_cpu(quick_compiler):
    """Catches the fast path left unused where it could run."""
    backend = select_backend("auto", "cpu")
    assert backend.name == "cpp"
    assert backend.paged_attention is not paged_attention


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("there-is-no-such-compiler", "no C++ compiler found (looked for there-is-no-such-compiler)"),
        ("exit 3", "fake-c++ failed: exit status 3"),
        ('[ "$1" = --version ] || { echo "x.cpp:1: error: too new" >&2; exit 1; }', "error: too new"),
    ],
    ids=["no compiler", "compiler does not run", "compiler rejects the source"],
)
def test_auto_falls_back_to_torch_in_one_line_if_nothing_can_be_built(
    compiler, message, tmp_path, monkeypatch, caplog
):
    """Catches a program that ends, or a compiler's output on the screen, because of an optional extra."""
    if " " in compiler:
        compiler = fake_compiler(tmp_path, compiler)
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO, logger="minipaged.kernels.dispatch"):
        assert select_backend("auto", "cpu").paged_attention is paged_attention
    (line,) = caplog.messages
    assert line.startswith("attention backend: torch (chosen for device cpu; cpp cannot be used: ")
    assert message in line


def test_an_unwritable_cache_directory_is_a_reason_like_any_other(tmp_path, monkeypatch):
    """Catches a PermissionError out of a read-only home; a file in the way stands for it (root may write)."""
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "true"))
    with pytest.raises(BuildError, match="cache"):
        load_library()


def test_without_a_home_the_cache_is_no_folder_called_tilde(tmp_path, monkeypatch):
    """Catches ./~/.cache in the current directory: whoever removes it may remove their home."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_directory().parent == tmp_path
    assert cache_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)  # (a folder of root's, or whoever runs the tests)
    (tmp_path / "minipaged-12345").mkdir()
    with pytest.raises(BuildError, match="belongs to another user; set XDG_CACHE_HOME"):
        cache_directory()


def test_a_library_that_cannot_be_loaded_is_a_reason_like_any_other(tmp_path, monkeypatch):
    """Catches an OSError from a compiler that writes something else than a library."""
    script = 'for last; do :; done; [ "$1" = --version ] || echo nonsense > "$last"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with pytest.raises(BuildError, match=r"(file too short|invalid ELF).*; set CXX to g\+\+ or clang\+\+$"):
        load_library()


@needs_compiler
@pytest.mark.parametrize("library", ["no_symbols", "undefined_symbol"])
def test_a_library_of_something_else_is_a_reason_like_any_other(library, tmp_path, monkeypatch):
    """Catches an AttributeError, and CXX=gcc, which leaves out libstdc++, taken for a folder's fault."""
    source = {"no_symbols": "int x;", "undefined_symbol": "int absent(); int x = absent();"}[library]
    own = f"{shlex.join(find_compiler())} -shared -fPIC -x c++ - -o"
    script = f'for last; do :; done; [ "$1" = --version ] || echo "{source}" | {own} "$last"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with pytest.raises(BuildError, match=r"undefined symbol.*; set CXX to g\+\+ or clang\+\+$"):
        load_library()


@pytest.mark.parametrize("writes", ["nothing", "an empty file"])
def test_a_compiler_that_writes_no_library_is_named_and_leaves_none(writes, tmp_path, monkeypatch):
    """Catches an empty library, kept as whole for when the compiler works, and a folder that is blamed."""
    script = 'for last; do :; done; [ "$1" = --version ] || : > "$last"' if "file" in writes else "true"
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with pytest.raises(BuildError, match=r"fake-c\+\+ wrote no library$"):
        load_library()
    assert files() == []


def test_a_compiler_that_cannot_be_executed_is_not_taken_for_a_folder(tmp_path, monkeypatch):
    """Catches "set XDG_CACHE_HOME" for a compiler of another machine, or a script of a missing program."""
    compiler = fake_compiler(tmp_path, "")
    (tmp_path / "fake-c++").write_text("#!/no/such/program\n")
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError, match=r"fake-c\+\+ does not run: No such file.*; install g\+\+ or clang$"):
        load_library()


def test_a_compiler_that_compiles_nothing_is_not_said_to_lack_openmp(tmp_path, monkeypatch, caplog):
    """Catches a student who installs libomp, which is not what is missing."""
    script = '[ "$1" = --version ] || { echo "fatal error: cstdint: No such file" >&2; exit 1; }'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with caplog.at_level(logging.INFO), pytest.raises(BuildError, match="cstdint"):
        load_library()
    assert "OpenMP" not in caplog.text


def test_cpp_by_name_says_what_is_missing_and_what_to_use(monkeypatch):
    """Catches a silent second choice for someone who asked by name."""
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    with pytest.raises(ValueError, match=r"'cpp' cannot be used: no C\+\+ compiler.*; use 'torch' or 'auto'"):
        select_backend("cpp", "cpu")
    with pytest.raises(ValueError, match="C\\+\\+ kernels run on CPUs, this device is 'cuda'"):
        select_backend("cpp", torch.device("cuda"))


@needs_compiler
@pytest.mark.parametrize("share", [0, 0.3, 0.999])
def test_a_library_that_was_cut_is_built_again(share, quick_compiler):
    """Catches the bus error of a library that a full disk or a crash has truncated."""
    load_library()
    path = library_path()
    whole = path.read_bytes()
    load_library.cache_clear()
    path.unlink()  # (this process has the old one mapped)
    path.write_bytes(whole[: int(share * len(whole))])
    load_library()
    assert path.read_bytes() == whole
    assert build.is_whole(path)
    assert files() == files_of(path)


@pytest.mark.slow
@needs_compiler
def test_cxx_may_be_a_command_with_arguments(tmp_path, monkeypatch):
    """Catches `CXX="ccache g++"` taken for the name of one program."""
    monkeypatch.setenv("CXX", shlex.join([fake_compiler(tmp_path, 'exec "$@"'), *find_compiler()]))
    assert load_library().write_tokens
    assert find_compiler()[0].endswith("fake-c++")


@pytest.mark.slow
@needs_compiler
def test_a_compiler_without_openmp_builds_for_one_thread(tmp_path, monkeypatch, caplog):
    """Catches the fast path lost on a Mac, whose clang refuses -fopenmp; says what would bring threads."""
    script = f'for a; do [ "$a" = -fopenmp ] && exit 1; done; exec {" ".join(find_compiler())} "$@"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with caplog.at_level(logging.INFO, logger="minipaged.kernels.cpp.build"):
        assert load_library().write_tokens
    compiling, line = caplog.messages
    assert line.endswith("has no OpenMP; install libomp")
    assert compiling.startswith("compiling the C++ kernels")
    assert library_path().name not in files()


@pytest.mark.parametrize(
    ("system", "machine", "flag", "suffix"),
    [
        ("linux", "x86_64", "-march=native", ".so"),
        ("linux", "aarch64", "-mcpu=native", ".so"),
        ("darwin", "arm64", "-mcpu=native", ".dylib"),
        ("darwin", "x86_64", "-march=native", ".dylib"),
    ],
)
def test_flags_and_suffix_are_those_of_the_machine(system, machine, flag, suffix, tmp_path, monkeypatch):
    """Catches -march=native, which clang on Arm refuses, and a Mac's process with two OpenMP runtimes."""
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "true"))
    assert build.processor_flag() == flag
    assert library_path().suffix == suffix
    assert ("-lomp" in build.openmp_flags()) == (system == "darwin")


@pytest.mark.parametrize(
    ("system", "advice"),
    [("linux", "install g"), ("darwin", "xcode-select --install"), ("win32", "in WSL they are")],
)
def test_the_reason_says_what_to_install(system, advice, monkeypatch):
    """Catches a student who reads that something is missing, and not how to get it."""
    monkeypatch.setattr(build.sys, "platform", system)
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    with pytest.raises(BuildError, match=advice):
        find_compiler()


def test_the_place_of_macos_compiler_without_a_compiler_names_what_to_install(tmp_path, monkeypatch):
    """Catches "c++ failed: exit status 1": macOS has a /usr/bin/c++ that only asks for the real one."""
    script = "echo 'xcode-select: note: No developer tools were found, requesting install.' >&2; exit 1"
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(BuildError, match=r"fake-c\+\+ failed: exit status 1; xcode-select --install"):
        load_library()


def test_a_compiler_that_speaks_the_users_language_is_understood(tmp_path, monkeypatch):
    """Catches "exit status 1" in place of the reason, and a UnicodeDecodeError."""
    word = '[ "$LC_ALL" = C ] && word=error || word=Fehler'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, rf'{word}; printf "\377: $word: ABC\n" >&2; exit 1'))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(BuildError, match="error: ABC"):
        load_library()


@pytest.mark.parametrize("command", ['"g++', " "])
def test_a_compiler_that_is_not_a_command_is_reported(command, monkeypatch):
    """Catches "No closing quotation", and a model that does not start where it needs no compiler."""
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=re.escape(f"CXX is {command!r}; give a command like")):
        find_compiler()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_reported_with_the_fix(quick_compiler, tmp_path, monkeypatch):
    """Catches "Permission denied", and a slower run at every start."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"file.*; set XDG_CACHE_HOME to a folder of yours"):
        load_library()
