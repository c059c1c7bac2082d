#!/usr/bin/python3
"""A CSI driver of inline volumes, each a tmpfs with one file: what a kubelet calls of it, over gRPC.

    csi_driver.py NAME KUBELET-ROOT CONTENT

The messages are those of the CSI specification (csi.proto, v1) and of the kubelet's plugin registration
(pkg/kubelet/apis/pluginregistration/v1/api.proto). Needs python3-h2: h2's Rust counterpart refuses the authority that
older kubelets send, the path of the socket.
"""

import os
import socket
import subprocess
import sys
import threading

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded

NAME, ROOT, CONTENT = sys.argv[1:]
FOLDER = f"{ROOT}/plugins/{NAME}"
ENDPOINT = f"{FOLDER}/csi.sock"


def text(number, value):
    """A string field of fewer than 128 bytes."""
    data = value.encode()
    assert len(data) < 128, value
    return bytes([number << 3 | 2, len(data)]) + data


def fields(message):
    """The fields of a message that are strings or messages, by number."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        value = varint()
        if key & 7 == 2:
            found[key >> 3] = message[at : at + value]
            at += value
    return found


def publish(target):
    if os.path.ismount(target):
        return
    os.makedirs(target, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", target], check=True)
    with open(f"{target}/app.conf", "w") as file:
        file.write(CONTENT)


def unpublish(target):
    if os.path.ismount(target):
        subprocess.run(["umount", target], check=True)
    if os.path.isdir(target):
        os.rmdir(target)


def answer(method, message):
    if method.endswith("Registration/GetInfo"):
        return text(1, "CSIPlugin") + text(2, NAME) + text(3, ENDPOINT) + text(4, "1.0.0")
    if method.endswith("Identity/GetPluginInfo"):
        return text(1, NAME)
    if method.endswith("Node/NodeGetInfo"):
        return text(1, "node")
    if method.endswith("Node/NodePublishVolume"):
        publish(fields(message)[4].decode())
    if method.endswith("Node/NodeUnpublishVolume"):
        unpublish(fields(message)[2].decode())
    return b""


def talk(stream):
    config = H2Configuration(client_side=False, header_encoding="utf-8", validate_inbound_headers=False)
    connection = H2Connection(config=config)
    connection.initiate_connection()
    stream.sendall(connection.data_to_send())
    calls = {}
    while data := stream.recv(65536):
        for event in connection.receive_data(data):
            if isinstance(event, RequestReceived):
                calls[event.stream_id] = [dict(event.headers)[":path"], b""]
            elif isinstance(event, DataReceived):
                calls[event.stream_id][1] += event.data
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                method, message = calls.pop(event.stream_id)
                # A message comes after a byte without compression and four bytes of its length.
                reply, status = b"", "0"
                try:
                    reply = answer(method, message[5:])
                except Exception as error:
                    print(method, error, file=sys.stderr, flush=True)
                    status = "13"
                connection.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
                connection.send_data(event.stream_id, b"\0" + len(reply).to_bytes(4, "big") + reply)
                connection.send_headers(event.stream_id, [("grpc-status", status)], end_stream=True)
        stream.sendall(connection.data_to_send())


def serve(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        stream, _ = listener.accept()
        threading.Thread(target=talk, args=[stream], daemon=True).start()


os.makedirs(FOLDER, exist_ok=True)
threading.Thread(target=serve, args=[ENDPOINT], daemon=True).start()
serve(f"{ROOT}/plugins_registry/{NAME}-reg.sock")
