"""Behind nginx as people set it up, with nothing but `proxy_pass`."""

from __future__ import annotations

import http.client
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.http import free_port
from tests.peer.processes import poll
from tests.web.client import Site
from tests.web.room import Room, said
from tests.web.test_watching import until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
FIRST_SECONDS = 30.0  # nginx that waits for a full buffer takes 60 and more; alone it takes a tenth of a second

pytestmark = [
    pytest.mark.real("nginx is a process"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]

CONFIGURATION = """
daemon off; pid t/nginx.pid; error_log t/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{ access_log off; client_body_temp_path t/b; proxy_temp_path t/p; fastcgi_temp_path t/f; uwsgi_temp_path t/u;
  scgi_temp_path t/s;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}
}}
"""


@contextmanager
def nginx(folder: Path, port: int, behind: int) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "t").mkdir()
    configuration = folder / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, port=port, behind=behind))
    assert NGINX is not None
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(configuration)], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def streamed(site: Site) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(site.host, site.port, timeout=FIRST_SECONDS)
    connection.request("GET", "/api/v1/events?live=1", headers={"Connection": "close"})
    return connection.getresponse()


async def test_live_shows_its_first_figures_at_once_behind_nginx(tmp_path: Path) -> None:
    folder, port = tmp_path / "nginx", free_port()
    folder.mkdir()
    async with Room(tmp_path).serving() as (_, site):
        with nginx(folder, port, site.port) as process:
            before = Site("127.0.0.1", port)

            async def answers() -> bool:
                assert process.poll() is None, (folder / "output").read_text()
                try:
                    return (await said(before.get, "/live")).status == 200
                except OSError:
                    return False

            await poll(answers)
            stream = await said(streamed, before)
            assert (await said(until, stream, "live"))[2]["status"]["network"] == "lab"
            stream.close()
            assert (await said(before.get, "/metrics")).code == "unauthorized", "nginx asks for others"
