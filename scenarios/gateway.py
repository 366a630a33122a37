"""A small UPnP router that describes itself, answers searches, and keeps a table of forwardings or refuses them on request.

It follows the standards (UPnP Device Architecture 1.0; WANIPConnection:1) and shares no code with the code under test. It
forwards no packet. `python -m scenarios.gateway HOST FILE` runs one until its standard input ends, and writes its table to a
file.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

GROUP, PORT = "239.255.255.250", 1900
DEVICE, SERVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1", "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN><serviceList>
<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service>
</serviceList></device></deviceList></device></deviceList></device></root>"""
ENVELOPE = '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{}</s:Body></s:Envelope>'
TAKEN, NO_LEASES, FORBIDDEN = 718, 725, 606


@dataclass
class Router:
    outside: str = "1.1.1.1"
    taken: frozenset[int] = frozenset()  # ports that other machines use
    has_leases: bool = True
    forbids: bool = False
    url: str = ""
    table: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # external port -> host, its port, seconds
    asked: list[str] = field(default_factory=list)

    def answer(self, action: str, said: dict[str, str]) -> dict[str, str] | int:
        """Return the values of an action, or the number of an error."""
        self.asked.append(action)
        port = int(said.get("NewExternalPort", 0))
        if action == "GetExternalIPAddress":
            return {"NewExternalIPAddress": self.outside}
        if action == "GetStatusInfo":
            return {"NewConnectionStatus": "Connected", "NewLastConnectionError": "ERROR_NONE", "NewUptime": "1"}
        if action == "DeletePortMapping":
            return {} if self.table.pop(port, None) else 714
        assert action == "AddPortMapping" and said["NewProtocol"] == "TCP"
        if self.forbids or port in self.taken:
            return FORBIDDEN if self.forbids else TAKEN
        seconds = int(said["NewLeaseDuration"])
        if seconds and not self.has_leases:
            return NO_LEASES
        self.table[port] = said["NewInternalClient"], int(said["NewInternalPort"]), seconds
        return {}


@contextmanager
def running(router: Router, host: str = "127.0.0.1", *, searched: bool = False) -> Iterator[Router]:
    """Run the router in threads. With `searched` it also answers multicast searches."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, DESCRIPTION)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
            answer = router.answer(action, dict(re.findall(r"<(New\w+)>([^<]*)</", body)))
            if isinstance(answer, int):
                error = f"<UPnPError><errorCode>{answer}</errorCode><errorDescription>no</errorDescription></UPnPError>"
                fault = f"<faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>{error}</detail>"
                self._send(500, ENVELOPE.format(f"<s:Fault>{fault}</s:Fault>"))
            else:
                values = "".join(f"<{name}>{value}</{name}>" for name, value in answer.items())
                self._send(200, ENVELOPE.format(f'<u:{action}Response xmlns:u="{SERVICE}">{values}</u:{action}Response>'))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer((host, 0), Handler)
    router.url = f"http://{host}:{server.server_port}/root.xml"
    ears = _ears(host) if searched else None
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,))]
    threads += [threading.Thread(target=_answer_searches, args=(ears, router.url))] if ears else []
    for thread in threads:
        thread.start()
    try:
        yield router
    finally:
        server.shutdown()
        if ears:
            ears.sendto(b"end", ears.getsockname()[:2])
        for thread in threads:
            thread.join()
        server.server_close()


def _ears(host: str) -> socket.socket:
    ears = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ears.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    ears.bind((GROUP, PORT))
    ears.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("4s4s", *map(socket.inet_aton, (GROUP, host))))
    ears.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
    return ears


def _answer_searches(ears: socket.socket, url: str) -> None:
    with ears:
        while (heard := ears.recvfrom(2_000))[0] != b"end":
            if heard[0].startswith(b"M-SEARCH") and DEVICE.encode() in heard[0]:
                head = "HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nEXT:\r\nSERVER: test\r\n"
                ears.sendto(f"{head}ST: {DEVICE}\r\nUSN: uuid:1::{DEVICE}\r\nLOCATION: {url}\r\n\r\n".encode(), heard[1])


class Written(Router):
    """A router that keeps its table in a file, as JSON."""

    file: Path

    def answer(self, action: str, said: dict[str, str]) -> dict[str, str] | int:
        answer = super().answer(action, said)
        self.file.write_text(json.dumps(self.table))
        return answer


def main(arguments: list[str]) -> int:
    host, file = arguments
    router = Written()
    router.file = Path(file)
    with running(router, host, searched=True):
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
