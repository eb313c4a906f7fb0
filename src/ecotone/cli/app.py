"""Commands, options, and what an error looks like: one line on stderr, exit code 1 (2 for wrong usage)."""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

import ecotone
from ecotone.cli import demo as demo_command
from ecotone.cli import fleet
from ecotone.cli import generate as generate_command
from ecotone.cli import node as node_command
from ecotone.cli.cache import cache
from ecotone.cli.console import err, out
from ecotone.cli.inspect_report import print_inspection
from ecotone.cli.models import find_model
from ecotone.cli.report import print_report
from ecotone.config import parse_bytes
from ecotone.errors import EcotoneError
from ecotone.node.disk import DiskConfig, Fsync

# Modules of the "engine" extra: the command line runs a model, which the bare package cannot.
_ENGINE_MODULES = ("torch", "transformers", "PIL", "tokenizers", "safetensors")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the only one that fills paragraphs
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"ecotone {version('ecotone')}")
        raise typer.Exit


@app.callback()
def ecotone_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A distributed encoder cache for multimodal inference: an image is encoded once, and used everywhere."""


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="Folder of the model; 'digits' is the one that comes with the repository.")
    ] = "digits",
    images: Annotated[
        int, typer.Option(min=4, help="How many labelled images of the model's folder to use.")
    ] = 12,
    cache_images: Annotated[
        int, typer.Option(min=2, help="How many encodings fit into the worker's own encoder cache.")
    ] = 3,
    engines: Annotated[
        int, typer.Option(min=1, help="With more than one: so many processes share a node, and one is killed.")
    ] = 1,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks that divide each layer of the engine with the cache.")
    ] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Stages that divide its layers, each of so many ranks.")] = 1,
    executor: Annotated[
        Literal["auto", "uniproc", "multiproc", "ray"], typer.Option(help="How steps reach the ranks.")
    ] = "auto",
    encoder: Annotated[
        Literal["weights", "data"],
        typer.Option(help="Whether ranks divide the encoder's weights, or the images."),
    ] = "weights",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Ask a real model several questions about each of a set of handwritten digits, with the cache and without.

    The worker's encoder cache is so small that an image's encoding is gone when the image comes back: with Ecotone
    it is loaded, without it is computed again. The answers must be the same, token by token; otherwise the exit
    code is 1. With several ranks, the engine without the cache still has one.
    """
    if engines > 1:
        _demo_fleet(find_model(model), images, cache_images, engines, as_json)
        return
    layout = {
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": pp,
        "executor": executor,
        "mm_encoder_tp_mode": encoder,
    }
    result = demo_command.run(find_model(model), images, cache_images, layout)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        print_report(result)
    if not result.identical:
        raise typer.Exit(1)


def _demo_fleet(model: Path, images: int, cache_images: int, engines: int, as_json: bool) -> None:
    result = fleet.run(model, images, cache_images, engines)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        fleet.print_report(result)
    if not result.identical:
        raise typer.Exit(1)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint, or 'digits'.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")],
    image: Annotated[
        list[str] | None, typer.Option("--image", "-i", help="An image file or data: URL; repeat it for several.")
    ] = None,
    audio: Annotated[
        list[str] | None, typer.Option("--audio", "-a", help="A WAV file or data: URL; repeat it for several.")
    ] = None,
    video: Annotated[
        list[str] | None, typer.Option("--video", "-v", help="An animated GIF or WebP; repeat it for several.")
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Take the prompt as it is, with its placeholders, and no chat template."),
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most probable token; more is more random.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the tokens that make up this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; repeat it for several.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or e.g. cuda:1.")] = "auto",
    memory: Annotated[
        str | None, typer.Option(help="Memory for encodings, e.g. 512MB or 2GiB; 256MiB if not said.")
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="A directory for encodings, used again by the next run.")
    ] = None,
    node: Annotated[
        Path | None,
        typer.Option(help="The socket of an `ecotone node`, whose cache is used instead of one's own."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run without the encoder cache.")] = False,
) -> None:
    """Answer one question about your own images, clips or videos with your own model, streaming it to stdout.

    At the end it says on stderr how many of them were encoded, and how many loaded.
    """
    params = ecotone.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    options = generate_command.cache_options(memory, disk, node)
    ec = None if no_cache else ecotone.ECConfig(options=options)
    config = ecotone.EngineConfig(model=str(find_model(model)), device=device, ec=ec)
    generate_command.run(config, prompt, params, image or [], video or [], audio or [], raw=raw)


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face checkpoint, or 'digits'.")
    ],
    image: Annotated[
        list[str] | None,
        typer.Option("--image", "-i", help="Count the rows of this image; repeat it for several."),
    ] = None,
    audio: Annotated[
        list[str] | None, typer.Option("--audio", "-a", help="Count the rows of this WAV file.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory for encodings, e.g. 512MB or 8GiB.")] = "1GiB",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the encodings.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Say what the cache will hold for a model: its encoder, the rows and bytes of an item, and how many fit.

    The weights are not loaded, and need not be there.
    """
    size = parse_bytes(memory, "memory")
    found = ecotone.inspect_model(
        find_model(model), memory=size, dtype=dtype, images=image or [], audio=audio or []
    )
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_inspection(found)


@app.command()
def node(
    socket: Annotated[Path, typer.Option(help="Where engines find it: a path for a Unix socket.")],
    memory: Annotated[str, typer.Option(help="Memory for encodings, e.g. 8GiB.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="A region of its own for a tenant; repeat it for several."),
    ] = None,
    eviction: Annotated[
        str, typer.Option(help="What goes first: lru (least recently used) or cost (cheapest to encode again).")
    ] = "lru",
    disk: Annotated[
        Path | None, typer.Option(help="A directory for what memory has no room for; used again after a restart.")
    ] = None,
    disk_size: Annotated[str, typer.Option(help="Bytes that files in it may take, e.g. 100GiB.")] = "10GiB",
    fsync: Annotated[
        Fsync, typer.Option(help="data: write each entry through to the device; none: leave it to the kernel.")
    ] = "none",
    prefault: Annotated[
        bool, typer.Option(help="Take the memory from the machine now, not as it is touched.")
    ] = True,
) -> None:
    """Hold one cache for every engine on this host.

    Engines find it with the connector's option `node: unix:PATH`. It serves processes of its own user until
    SIGTERM, and tells a service manager when it is ready (Type=notify).
    """
    behind = None
    if disk is not None:
        behind = DiskConfig(root=str(disk), budget=parse_bytes(disk_size, "disk-size"), fsync=fsync)
    tenants = node_command.parse_tenants(memory, tenant or [])
    node_command.run(socket, tenants, eviction, disk=behind, prefault=prefault)


@app.command()
def sim(
    seeds: Annotated[int, typer.Option(min=1, help="How many simulations to run.")] = 1000,
    start: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Replay this one, with its timeline.")] = None,
    shrink: Annotated[bool, typer.Option(help="Cut a failing plan down before it is shown.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Simulate engines, ranks and a node in virtual time, with everything going wrong, and check the protocol.

    The same seed is the same simulation. The exit code is 1 when a rule was broken.
    """
    sim_command = import_module("ecotone.cli.sim")  # it needs torch, and the other commands do not
    if seed is not None:
        held = sim_command.run_seed(seed, shrinking=shrink, as_json=as_json)
    else:
        held = sim_command.run_sweep(start, seeds, shrinking=shrink, as_json=as_json)
    if not held:
        raise typer.Exit(1)


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="An ECConnectorFactory class, a Subject, a worker metadata type, or 'EcotoneConnector'"
            " (also with -disk, -node or -hosted behind it).",
        ),
    ],
    options: Annotated[
        str | None, typer.Option(help="The connector's options, as a JSON object; {scratch} is a new directory.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random examples.")] = 0,
    examples: Annotated[int, typer.Option(min=0, help="How many random examples to run.")] = 40,
    only: Annotated[str, typer.Option(help="Run this one example, as a violation names it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Check an EC connector against every rule of the step protocol.

    A broken rule is printed with its text and the shortest events that break it, and the exit code is 1.
    """
    check_command = import_module("ecotone.cli.check")  # it needs torch, and the other commands do not
    if not check_command.run(target, options=options, seed=seed, examples=examples, only=only, as_json=as_json):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``ecotone`` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except EcotoneError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _ENGINE_MODULES:
            raise
        _fail(f"running a model needs {error.name}: pip install 'ecotone[engine]'")


def _fail(message: str) -> None:
    err.print(Text("error: " + " ".join(message.split()), style="bold red"), soft_wrap=True)
    raise SystemExit(1)
