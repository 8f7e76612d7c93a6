"""The keys of `rollout` about remote engines, and about training while they generate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyrl_ext.plan.language.fields import Positive, Rate, RelativePath, Section, Text

File = Annotated[Text, RelativePath()]
Address = Annotated[str, Field(pattern=r"^https?://[^/\s:@?#]+:[1-9]\d{0,4}$")]


class Launch(Section):
    """Hosts on which `pyrl serve` starts the engines, in place of their addresses."""

    hosts: list[Text] = Field(default=[])
    """names or numbers by which the trainer reaches the hosts"""
    gpus: Positive = 8
    """of each host; each engine takes rollout.tp of them (on a CPU: number of engines)"""
    port: Annotated[int, Field(ge=1024, le=65000)] = 8000
    """of the first engine of a host; each further engine takes the next"""

    def addresses(self, tp: int, scheme: str = "http") -> list[str]:
        """Addresses of the engines of `tp` GPUs each, host by host."""
        ports = range(self.port, self.port + self.gpus // tp)
        return [f"{scheme}://{host}:{port}" for host in self.hosts for port in ports]


class Tls(Section):
    """Files for TLS between trainer and engines, in PEM form, relative to this YAML file."""

    ca: File
    """certificates of the authorities that sign those of the engines"""
    cert: File
    """certificate of the host that reads it, with the names or addresses in rollout.servers or
    rollout.launch"""
    key: File
    """its private key"""


class Servers(Section):
    """Engines on other hosts, which the trainer reaches over HTTP."""

    servers: list[Address] = Field(default=[])
    """addresses of the engines, http://host:port each; empty with launch empty: the engines run
    colocated with the trainer's ranks"""
    launch: Launch = Field(default=Launch())
    """where python -m pyrl_ext.train.serve starts them, in place of servers"""
    min_servers: Positive = 1
    """the run stops when fewer engines are left"""
    senders: Positive = 1
    """ranks that send weights, each a part of them to all engines; they are spread over pipeline
    stages and hosts, to use the network connections of all hosts"""
    overlap_publish: bool = True
    """with ahead: senders copy the weights into host memory, and the trainer continues with its
    forward passes while they are sent; false: it waits until the engines have the weights"""
    delta_sync: bool = False
    """a weight sync sends only what changed since the one before, which senders and engines keep in
    host memory; everything, while an engine joins or where more than half of a bucket changed"""
    keys: Text | None = None
    """folder with the files generate and control, each a secret that servers require; null: none,
    which only loopback addresses allow"""
    tls: Tls | None = None
    """engines speak HTTPS, and weights are encrypted; null: neither, so the network must be
    private"""
    request_timeout: Rate = 120.0
    """an engine is removed when a request gets no token from it for this long [seconds]"""
    publish_timeout: Rate = 600.0
    """an engine is removed when a step of a publish takes it longer than this [seconds]"""
    ahead: Annotated[int, Field(ge=0, le=64)] = 0
    """steps that the engines may generate ahead of the trainer; 0: engines and trainer take turns.
    Also the largest age of a token in weight versions, unless stale groups are trained on"""
    pause: Literal["finish", "keep", "abort"] = "abort"
    """running requests when weights are published. finish: wait for them; keep: pause them and keep
    keys and values of the old weights; abort: continue from their tokens with the new weights"""
    second_span_routes: Literal["masked", "recorded"] = "masked"
    """routes of tokens generated before a weight update within a sample. masked: the trainer routes
    them itself; recorded: it uses the engine's, from the old weights"""
    stale_groups: Literal["drop", "train"] = "drop"
    """groups with a loss token more than ahead versions old: drop and count them, or train on them
    with the objective's correction"""

    @property
    def syncs_weights_in_background(self) -> bool:
        """True if the trainer continues while a copy of its weights is sent from host memory."""
        return bool(self.servers or self.launch.hosts) and self.ahead > 0 and self.overlap_publish
