"""An authority and certificates that it signs, made with openssl as docs/remote_engines.md says."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
# `openssl req` makes no certificate that has expired
EXPIRED = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
CONFIG = """
[ca]
default_ca = own
[own]
database = {folder}/index
serial = {folder}/serial
new_certs_dir = {folder}
policy = any
default_md = sha256
copy_extensions = copy
[any]
commonName = supplied
"""


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    cert: str
    key: str


class Authority:
    """An authority with its files in a new folder."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.cert = str(folder / "ca.pem")
        self.key = str(folder / "ca.key")
        days = ("-days", 2, "-subj", "/CN=pyrl")
        openssl("req", "-x509", *CURVE, *days, "-keyout", self.key, "-out", self.cert)

    def sign(self, name: str, *hosts: str, expired: bool = False) -> Pair:
        """A certificate for hosts, each as DNS:name or IP:address."""
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        asked = (*CURVE, "-subj", f"/CN={name}", "-addext", f"subjectAltName={','.join(hosts)}")
        ca = ("-CA", self.cert, "-CAkey", self.key)
        if not expired:
            end = ("-addext", "basicConstraints=critical,CA:false", "-days", 2)
            out = ("-keyout", pair.key, "-out", pair.cert)
            openssl("req", "-x509", *ca, *asked, *end, *out)
            return pair
        request = self.folder / f"{name}.csr"
        config = self.folder / "ca.conf"
        config.write_text(CONFIG.format(folder=self.folder))
        (self.folder / "index").touch()
        openssl("req", "-new", *asked, "-keyout", pair.key, "-out", request)
        by = ("-config", config, "-cert", self.cert, "-keyfile", self.key, "-create_serial")
        openssl("ca", "-batch", "-notext", *by, *EXPIRED, "-in", request, "-out", pair.cert)
        return pair

    def options(self, pair: Pair) -> tuple[str, ...]:
        """The overrides of a config for this certificate."""
        files = {"ca": self.cert, "cert": pair.cert, "key": pair.key}
        return tuple(f"rollout.tls.{name}={file}" for name, file in files.items())
