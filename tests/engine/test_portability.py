"""What the kernels promise holds for every compiler and processor: the same bits, and structs as Python fills them.

The driver (portability/driver.cpp) checks that a row has the same bits in any company. Its digests are compared with
those below: they depend on the width of vectors and on whether a multiply-add is fused, and on nothing else. After a
change to the order of operations, the failing tests print the new ones.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from dora_rl.core.errors import ModelError
from dora_rl.engine.cpu_kernels import binding, build
from dora_rl.engine.requests import Request, Sampling
from tests.engine import tiny
from tests.engine.processors import runnable

HERE = Path(__file__).parent / "portability"
KERNELS = Path(build.__file__).parent
DIGESTS = {
    "vectors of 16 floats, fused multiply-add": {
        "functions": "f0e344bfa4a3b6a9",
        "product": "981b329ad3871fb1",
        "dense": "944446602d9bb6e9",
        "sparse": "90bca05ed9986126",
        "attention": "2cf8aaf492d49745",
        "sample": "2ac81979615b590d",
        "stretch": "6cd4007133c5c9ae",
    },
    "vectors of 8 floats, fused multiply-add": {
        "functions": "f0e344bfa4a3b6a9",
        "product": "981b329ad3871fb1",
        "dense": "44dd129cf99fe25f",
        "sparse": "6ab8f6218df39a51",
        "attention": "0a029f1d88425d05",
        "sample": "3c2ce0c3a4970e2c",
        "stretch": "fd354b704f8de72a",
    },
    "vectors of 8 floats, separate multiply-add": {
        "functions": "9d3eb600b2e78204",
        "product": "a833ee874a32e256",
        "dense": "64e825171299fa2e",
        "sparse": "adc8ff01d2427521",
        "attention": "688eab3057e45d11",
        "sample": "a9a04e73b502122f",
        "stretch": "9a3d9e88f005a056",
    },
}
SECONDS = 280


def checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def agrees(output: str) -> None:
    """The structs are laid out as Python declares them, and the digests are those of any build of this kind."""
    kind, rest = output.split("\n", 1)
    assert rest.startswith(binding.layout() + "\n")
    found = dict(line.split()[1:] for line in rest.splitlines() if line.startswith("digest "))
    assert found == DIGESTS[kind], kind


@pytest.mark.parametrize("arch", runnable())
def test_the_same_bits_in_any_batch_on_each_processor(arch: str, tmp_path: Path) -> None:
    """The libraries are built and loaded as in the engine."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    library, reason = build.build_for(compiler, arch)
    assert library is not None, reason
    flags = [flag for flag in build.FLAGS if flag != "-O3"]  # the kernels are compiled already
    driver = [str(HERE / "driver.cpp"), library._name, f"-I{KERNELS}", "-o", str(tmp_path / "driver")]
    checked([compiler, *flags, "-O1", build.processor_flag(arch), *driver])
    agrees(checked([str(tmp_path / "driver")]))


@pytest.mark.parametrize("arch", runnable())
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_engine_equals_generate_on_each_processor(
    family: tiny.Family, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORA_RL_ARCH", arch)
    engine = tiny.engine(tiny.model(family), kernels="native", stretch=16)
    sampling = Sampling(max_tokens=12, temperature=0.0)
    some = [Request(trajectory=i, version=0, prompt=p, sampling=sampling) for i, p in enumerate(tiny.prompts(7))]
    collector = tiny.run(engine, some)
    assert [collector.responses[index].tokens for index in range(7)] == tiny.greedy_reference(family, 7, 12)


def compiled_apart(folder: Path, compiler: str, flag: str, *others: str) -> Path:
    """Compile the driver and the kernels with another compiler, without a warning."""
    sources = [str(HERE / "driver.cpp"), *(str(KERNELS / name) for name in build.SOURCES)]
    strict = ["-Wall", "-Wextra", "-Werror"]
    checked([compiler, *build.FLAGS, flag, *strict, *others, f"-I{KERNELS}", *sources, "-o", str(folder / "driver")])
    return folder / "driver"


@pytest.mark.portability
@pytest.mark.parametrize("arch", runnable())
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_both_compilers_give_the_same_bits(compiler: str, arch: str, tmp_path: Path) -> None:
    agrees(checked([str(compiled_apart(tmp_path, compiler, build.processor_flag(arch)))]))


@pytest.mark.portability
@pytest.mark.skipif(platform.machine() != "x86_64", reason="this machine is an ARM itself")
def test_the_same_bits_on_arm(tmp_path: Path) -> None:
    driver = compiled_apart(tmp_path, "aarch64-linux-gnu-g++", "-march=armv8-a", "-static")
    agrees(checked(["qemu-aarch64", str(driver)]))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes() -> None:
    assert build.build() == (None, "there is no C++ compiler (g++ or clang++)")
    engine = tiny.engine(tiny.model("llama"), kernels="auto")
    assert engine.kernels == "generic"
    sampling = Sampling(max_tokens=12, temperature=0.0)
    collector = tiny.run(engine, [Request(trajectory=0, version=0, prompt=tiny.prompts(1)[0], sampling=sampling)])
    assert collector.responses[0].tokens == tiny.greedy_reference("llama", 7, 12)[0]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_native_kernels_are_refused() -> None:
    with pytest.raises(ModelError) as refused:
        tiny.engine(tiny.model("llama"), kernels="native")
    assert str(refused.value) == (
        "kernels are set to native, but: there is no C++ compiler (g++ or clang++); set kernels to auto"
    )


def test_a_library_with_other_structs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache(ctypes.Structure):
        _fields_ = (*binding.Cache._fields_[:2], ("head_dim", ctypes.c_int64))

    monkeypatch.setattr(binding, "STRUCTS", (binding.Layer, binding.Model, Cache, *binding.STRUCTS[3:]))
    build.build_for.cache_clear()
    try:
        library, reason = build.build()
        assert library is None
        assert reason.endswith("it has 'layers 12 4' where Python has 'head_dim 16 8'")
        assert tiny.engine(tiny.model("llama"), kernels="auto").kernels == "generic"
        with pytest.raises(ModelError, match="where Python has"):
            tiny.engine(tiny.model("llama"), kernels="native")
    finally:
        build.build_for.cache_clear()


@pytest.mark.parametrize("struct", binding.STRUCTS)
def test_each_change_of_a_struct_is_detected(struct: type[ctypes.Structure], monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.library()
    assert library is not None
    assert binding.mismatch(library) == ""
    fields = list(struct._fields_)
    changed = {
        "swapped": [*fields[:-2], fields[-1], fields[-2]],
        "missing": fields[:-1],
        "added": [*fields, ("more", ctypes.c_void_p)],
    }
    for other in changed.values():
        made = type(struct.__name__, (ctypes.Structure,), {"_fields_": other})
        structs = tuple(made if one is struct else one for one in binding.STRUCTS)
        monkeypatch.setattr(binding, "STRUCTS", structs)
        assert binding.mismatch(library)
