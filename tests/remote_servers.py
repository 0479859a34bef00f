"""Real servers on loopback, started by a test: S3 by moto, SSH by asyncssh, HTTP by Python's own http.server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST = "127.0.0.1"
BUCKET = "drafts"


@dataclass(frozen=True)
class Remote:
    """How DVC reaches a remote: its URL, options of `dvc remote modify`, variables, and where its objects lie.

    objects: the folder in which the server keeps them, or None for S3.
    """

    url: str
    options: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    objects: Path | None = None


@contextmanager
def local_folder(folder: Path) -> Iterator[Remote]:
    yield Remote(str(folder / "store"), objects=folder / "store")


@contextmanager
def server_process(address: str, module: str, *options: str) -> Iterator[str]:
    """The address that `python -m module` prints. In a process of its own: Flask's proxies, which moto leaves in
    `sys.modules`, fail where vLLM's start looks through all modules.
    """
    command = [sys.executable, "-u", "-m", module, *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        said = iter(server.stdout.readline, "")
        found = next((match for line in said if (match := re.search(address, line))), None)
        assert found, f"{module} did not say its address"
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield found[1]
    finally:
        server.kill()
        server.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[Remote]:
    import boto3

    with server_process(r"Running on (http://\S+)", "moto.server", "-H", HOST, "-p", "0") as endpoint:
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        client.create_bucket(Bucket=BUCKET)
        yield Remote(f"s3://{BUCKET}/eagle3", {"endpointurl": endpoint}, names)


@contextmanager
def ssh_server(folder: Path) -> Iterator[Remote]:
    """SFTP below `folder/served`, for one key; the host is known in the home that `variables` names."""
    import asyncssh

    for name in ("home/.ssh", "served/store"):
        (folder / name).mkdir(parents=True)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user_key.write_private_key(str(folder / "home/.ssh/id_ed25519"))
    (folder / "home/.ssh/id_ed25519").chmod(0o600)
    (folder / "authorized").write_bytes(user_key.export_public_key())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(job):
        return asyncio.run_coroutine_threadsafe(job, loop).result(30)

    async def listen():
        return await asyncssh.create_server(
            asyncssh.SSHServer,
            HOST,
            0,
            server_host_keys=[host_key],
            authorized_client_keys=str(folder / "authorized"),
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(folder / "served").encode()),
        )

    server = wait(listen())
    try:
        port = server.sockets[0].getsockname()[1]
        known = f"[{HOST}]:{port} {host_key.export_public_key().decode()}"
        (folder / "home/.ssh/known_hosts").write_text(known)
        options = {"port": str(port), "user": "publisher", "keyfile": str(folder / "home/.ssh/id_ed25519")}
        yield Remote(f"ssh://{HOST}/store", options, {"HOME": str(folder / "home")}, folder / "served/store")
    finally:
        loop.call_soon_threadsafe(server.close)
        wait(server.wait_closed())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@contextmanager
def http_server(folder: Path) -> Iterator[Remote]:
    """Read only: `folder/store` is filled by other means."""
    (folder / "store").mkdir(parents=True)
    options = ("0", "--bind", HOST, "--directory", str(folder / "store"))
    with server_process(r"port (\d+)", "http.server", *options) as port:
        yield Remote(f"http://{HOST}:{port}", objects=folder / "store")


@contextmanager
def counting_server(store: Path) -> Iterator[tuple[str, Counter[str]]]:
    """The URL of an HTTP server of `store`, and the bytes of each object's content that it has sent, by path."""
    sent: Counter[str] = Counter()

    class Counting(SimpleHTTPRequestHandler):
        def copyfile(self, source, outputfile):
            with suppress(ConnectionError):  # who only asks whether it is there hangs up
                while block := source.read(1 << 16):
                    outputfile.write(block)
                    sent[self.path.lstrip("/")] += len(block)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer((HOST, 0), partial(Counting, directory=str(store)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


SERVERS = {"local": local_folder, "s3": s3_server, "ssh": ssh_server, "http": http_server}
