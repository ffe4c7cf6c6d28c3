"""Names of code in docstrings and signatures, as links to their documentation.

Names of other projects are in `PAGES`, so that the site needs no network to be built.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

CODE = re.compile(r"(?<![`:])`([^`]+)`(?!`)(\w?)")
# A lone word in lower case is mostly a parameter.
_NAME = re.compile(r"(?=[A-Z]|\w*[._]\w|\w*\(\)$)[A-Za-z_][\w.]*\w(?=(?:\(\))?$)")

PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
PAGES = {
    PYTHON + "collections.abc.html": "collections.abc.Callable collections.abc.Iterable "
    "collections.abc.Iterator collections.abc.Mapping collections.abc.Sequence "
    "collections.abc.Sized",
    PYTHON + "constants.html": "False None True",
    PYTHON + "dataclasses.html": "dataclasses.InitVar",
    PYTHON + "datetime.html": "datetime.timedelta",
    PYTHON + "exceptions.html": "BaseException Exception KeyboardInterrupt OSError RuntimeError "
    "StopIteration TimeoutError TypeError ValueError",
    PYTHON + "functions.html": "bool float int object",
    PYTHON + "os.html": "os.PathLike",
    PYTHON + "pathlib.html": "pathlib.Path",
    PYTHON + "stdtypes.html": "bytes dict frozenset list memoryview set str tuple",
    PYTHON + "typing.html": "typing.Any",
    TORCH + "data.html": "torch.utils.data.DataLoader torch.utils.data.Dataset "
    "torch.utils.data.distributed.DistributedSampler",
    TORCH + "distributed.html": "torch.distributed torch.distributed.DistBackendError "
    "torch.distributed.DistError torch.distributed.ReduceOp "
    "torch.distributed.destroy_process_group torch.distributed.get_rank "
    "torch.distributed.init_process_group torch.distributed.new_group",
    TORCH + "futures.html": "torch.futures.Future",
    TORCH + "optim.html": "torch.optim.Optimizer",
    TORCH + "rpc.html": "torch.distributed.rpc",
    TORCH + "tensor_attributes.html": "torch.device torch.dtype",
    TORCH + "tensors.html": "torch.Tensor",
    **{
        f"{TORCH}generated/{name}.html": name
        for name in (
            "torch.nn.BatchNorm1d",
            "torch.nn.EmbeddingBag",
            "torch.nn.Module",
            "torch.nn.SyncBatchNorm",
            "torch.nn.parallel.DistributedDataParallel",
            "torch.nn.utils.clip_grad_norm_",
        )
    },
}
"""The pages of other projects, and the names that the site mentions."""

URLS = {name: f"{page}#{name}" for page, names in PAGES.items() for name in names.split()}
# Modules have an anchor of another form, and what is imported has a short name too.
URLS |= {
    name: f"{url.partition('#')[0]}#module-{name}"
    for name, url in URLS.items()
    if name in ("torch.distributed", "torch.distributed.rpc")
}
URLS |= {name.rpartition(".")[2]: url for name, url in URLS.items() if "." in name}
URLS |= {name.replace("torch.distributed.", "dist."): url for name, url in URLS.items()}


def mark_code(_app: Any, *details: Any) -> None:
    """Turn `code` of a docstring into a literal, and into a link if it is a known name."""

    def mark(match: re.Match[str]) -> str:
        name = _NAME.match(match[1])
        marked = f":py:obj:`{match[1]} <{name[0]}>`" if name else f"``{match[1]}``"
        # An escaped space separates the code from letters right after it, as in `RRef`s.
        return marked + (f"\\ {match[2]}" if match[2] else "")

    lines: list[str] = details[-1]
    lines[:] = CODE.sub(mark, "\n".join(lines)).splitlines()


def link_other_projects(app: Any, env: Any, node: Any, content: Any) -> nodes.Node | None:
    """Link a name that is not documented on this site."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in URLS:
        return nodes.reference("", "", content, internal=False, refuri=URLS[target])
    if target[:1].isupper():  # a class of another module of Phalanx
        domain = env.get_domain("py")
        entries = (entry for name, entry in domain.objects.items() if name.endswith(f".{target}"))
        found = {(entry.docname, entry.node_id) for entry in entries}  # aliases have the same
        if len(found) == 1:
            page, anchor = found.pop()
            uri = f"{app.builder.get_relative_uri(node['refdoc'], page)}#{anchor}"
            return nodes.reference("", "", content, internal=True, refuri=uri, reftitle=anchor)
    return None


def skip_members_of_torch(_app: Any, *details: Any) -> bool | None:
    """Leave out methods whose documentation is PyTorch's."""
    member = details[2]
    return True if getattr(member, "__module__", "").startswith("torch.") else None


def shorten_defaults(*event: Any) -> tuple[str, str | None] | None:
    """Replace the representation of an enumeration's member in a signature by its name."""
    signature, returned = event[-2:]
    if not signature:
        return None
    return re.sub(r"<RedOpType\.(\w+): \d+>", r"ReduceOp.\1", signature), returned


def setup(app: Any) -> dict[str, bool]:
    """Register the changes of docstrings and signatures."""
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", skip_members_of_torch)
    app.connect("missing-reference", link_other_projects)
    return {"parallel_read_safe": True}
