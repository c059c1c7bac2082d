#!/usr/bin/python3
"""A registry that has every image: busybox of the machine, with what critest expects of the image's name.

    registry.py BUSYBOX PORT [CERTIFICATE KEY]

With a certificate it serves HTTPS for containerd's client integration suite, and each image is an index of three platforms.

It answers the pulls of the OCI distribution specification over HTTP or HTTPS, whatever the registry's name is. Scripts take the
places of nginx, httpd, ipcs and pgrep. No image has the digest of `test-image-digest`, and none has a set-uid program of
`nonewprivs`: those tests fail. So does MaskedPaths: Debian's busybox needs no /bin/ls to list files.
"""

import hashlib
import http.server
import io
import json
import ssl
import subprocess
import sys
import tarfile

BUSYBOX, PORT, HTTPS = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
NGINX = """#!/bin/sh
echo $$ > /var/run/nginx.pid
busybox httpd -f -p $1 -h /www &
wait
"""
HTTPD = """#!/bin/sh
echo "Command line: 'httpd -D FOREGROUND'"
exec busybox httpd -f -p 80 -h /www
"""
# Not the pod's first process: the pause image of the stories is a sleep.
PGREP = """#!/bin/sh
grep -lx "$1" /proc/[0-9]*/comm | grep -v /proc/1/
"""
PASSWD = """root:x:0:0::/:/bin/sh
www-data:x:33:33::/:/bin/sh
default-user:x:1000:1000::/:/bin/sh
nobody:x:65534:65534::/:/bin/false
"""
FILES = {
    "etc/passwd": PASSWD,
    "etc/group": "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
    "www/index.html": "<html><body><h1>It works!</h1></body></html>\n",
    "usr/sbin/nginx": NGINX,
    "usr/sbin/httpd-foreground": HTTPD,
    "usr/sbin/ipcs": "#!/bin/sh\ncat /proc/sysvipc/shm\n",
    "usr/sbin/pgrep": PGREP,
}
CLIENT_FILES = [
    ("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\nsys:x:3:3::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\nbackup:x:34:34::/:/bin/sh\n"),
    ("usr/bin/bash", 0o755, '#!/bin/sh\nexec sh "$@"\n'),
    # process 1 of a container gets no signal that it does not catch
    ("usr/bin/nc", 0o755, "#!/bin/sh\ntrap 'exit 143' TERM\nbusybox nc \"$@\" &\nwait $!\n"),
    ("usr/bin/passwd", 0o4755, "#!/bin/sh\n"),
]
USERS = {
    "test-image-user-uid": "1002",
    "test-image-user-username": "www-data",
    "test-image-user-uid-group": "1003:users",
    "test-image-user-username-group": "www-data:100",
    "test-image-predefined-group": "1000",
}
KIND = "application/vnd.oci.image."
BLOBS = {}


def layer():
    """A tar with busybox under each of its names."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:

        def add(name, kind, mode, content=b"", link=""):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(content), link
            tar.addfile(entry, io.BytesIO(content))

        for folder in "bin dev etc home mnt proc root run sys tmp usr usr/sbin var var/run www".split():
            add(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755)
        with open(BUSYBOX, "rb") as program:
            add("bin/busybox", tarfile.REGTYPE, 0o755, program.read())
        for name in subprocess.check_output([BUSYBOX, "--list"], text=True).split():
            if name != "busybox":
                add(f"bin/{name}", tarfile.LNKTYPE, 0o755, link="bin/busybox")
        for name, content in FILES.items():
            add(name, tarfile.REGTYPE, 0o755, content.encode())
    return made.getvalue()


def kept(content):
    """Keeps a blob and returns its digest."""
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    BLOBS[digest] = content
    return digest


def client_layer(name, architecture):
    """A layer that no other image has: the client suite checks whether an image is unpacked, and sums sizes up."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, mode, text in [("etc/image", 0o644, f"{name} {architecture}\n"), *CLIENT_FILES]:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.size = mode, len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


LAYER = layer()


def manifest(name, architecture="amd64"):
    """The manifest of the image with this name. Only amd64 has programs."""
    layers = [LAYER] if architecture == "amd64" else []
    if HTTPS:
        layers.append(client_layer(name, architecture))
    command = ["sh"]
    if name.startswith("hostnet-nginx"):
        command = ["nginx", "12003", "master process"]
    elif name == "nginx":
        command = ["nginx", "80", "master process"]
    elif name == "httpd":
        command = ["httpd-foreground"]
    elif name == "pause":
        command = ["sleep", "1000000000"]
    config = json.dumps({
        "architecture": architecture,
        "os": "windows" if name == "nanoserver" else "linux",
        "author": name,
        "config": {"Cmd": command, "Env": ["PATH=/usr/sbin:/usr/bin:/bin"], "User": USERS.get(name, "")},
        "rootfs": {"type": "layers", "diff_ids": [kept(content) for content in layers]},
    }).encode()
    return json.dumps({
        "schemaVersion": 2,
        "mediaType": KIND + "manifest.v1+json",
        "config": {"mediaType": KIND + "config.v1+json", "digest": kept(config), "size": len(config)},
        "layers": [
            {"mediaType": KIND + "layer.v1.tar", "digest": kept(content), "size": len(content)} for content in layers
        ],
    }).encode()


def index(name):
    """The index of the image with this name."""
    manifests = []
    for architecture, variant in [("amd64", {}), ("arm64", {"variant": "v8"}), ("s390x", {})]:
        content = manifest(name, architecture)
        manifests.append({
            "mediaType": KIND + "manifest.v1+json",
            "digest": kept(content),
            "size": len(content),
            "platform": {"architecture": architecture, "os": "windows" if name == "nanoserver" else "linux", **variant},
        })
    return json.dumps({"schemaVersion": 2, "mediaType": KIND + "index.v1+json", "manifests": manifests}).encode()


def tagged(name):
    """What a tag of the image with this name refers to."""
    name = name.rsplit("/", 1)[-1]
    return index(name) if HTTPS else manifest(name)


class Registry(http.server.BaseHTTPRequestHandler):
    """Answers /v2/, /v2/NAME/manifests/TAG and /v2/NAME/blobs/DIGEST."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        content, kind = b"{}", "application/json"
        if len(parts) >= 4 and parts[-2] == "manifests":
            content = BLOBS.get(parts[-1]) if ":" in parts[-1] else tagged("/".join(parts[1:-2]))
            kind = json.loads(content)["mediaType"] if content else kind
        elif len(parts) >= 4 and parts[-2] == "blobs":
            content, kind = BLOBS.get(parts[-1]), "application/octet-stream"
        if content is None:
            content = b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}'
            self.send_response(404)
        else:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", kept(content))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Registry)
if HTTPS:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*HTTPS)
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
