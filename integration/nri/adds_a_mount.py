#!/usr/bin/python3
"""An NRI plugin that adds a bind to each new container, after the plugins that registered earlier.

    adds_a_mount.py SOCKET SOURCE DESTINATION

It writes a line when the runtime has accepted it. The messages are those of nri's pkg/api/api.proto, over ttrpc on the
multiplexed connection of pkg/net/multiplex.
"""

import socket
import struct
import sys

SOCKET, SOURCE, DESTINATION = sys.argv[1:]
TO_PLUGIN, TO_RUNTIME = 1, 2
REQUEST, RESPONSE = 1, 2


def field(number, value):
    """A field that is a string or a message."""
    value = value.encode() if isinstance(value, str) else value
    size, length = b"", len(value)
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + value


def method_of(request):
    """The second string of a request: its service and method are shorter than 128 bytes."""
    at = 2 + request[1]
    return request[at + 2 : at + 2 + request[at + 1]].decode()


MOUNT = field(1, DESTINATION) + field(2, "bind") + field(3, SOURCE) + field(4, "rbind") + field(4, "rw")
ANSWERS = {
    "Configure": bytes([2 << 3, 1 << 3]),
    "CreateContainer": field(1, field(3, MOUNT)),
}

runtime = socket.socket(socket.AF_UNIX)
runtime.connect(SOCKET)


def receive(size):
    data = b""
    while len(data) < size:
        part = runtime.recv(size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


def send(connection, stream, kind, payload):
    message = struct.pack(">IIBB", len(payload), stream, kind, 0) + payload
    runtime.sendall(struct.pack(">II", connection, len(message)) + message)


register = field(1, "later") + field(2, "99")
service = "nri.pkg.api.v1alpha1.Runtime"
send(TO_RUNTIME, 1, REQUEST, field(1, service) + field(2, "RegisterPlugin") + field(3, register))
waiting = b""
while True:
    connection, length = struct.unpack(">II", receive(8))
    data = receive(length)
    if connection != TO_PLUGIN:
        continue
    waiting += data
    while len(waiting) >= 10:
        length, stream, kind, _ = struct.unpack(">IIBB", waiting[:10])
        if len(waiting) < 10 + length:
            break
        request, waiting = waiting[10 : 10 + length], waiting[10 + length :]
        if kind == REQUEST:
            method = method_of(request)
            send(TO_PLUGIN, stream, RESPONSE, field(2, ANSWERS.get(method, b"")))
            if method == "Synchronize":
                print("registered", flush=True)
