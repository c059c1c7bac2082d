#!/usr/bin/python3
"""A registry that has every image: busybox of the machine, with what critest expects of the image's name.

    registry.py BUSYBOX PORT

It answers the pulls of the OCI distribution specification over HTTP, whatever the registry's name is. Scripts take the
places of nginx, httpd, ipcs and pgrep. No image has the digest of `test-image-digest`, and none has a set-uid program of
`nonewprivs`: those tests fail. So does MaskedPaths: Debian's busybox needs no /bin/ls to list files.
"""

import hashlib
import http.server
import io
import json
import subprocess
import sys
import tarfile

BUSYBOX, PORT = sys.argv[1], int(sys.argv[2])
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

        for folder in "bin dev etc home mnt proc root sys tmp usr usr/sbin var var/run www".split():
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


LAYER = layer()
LAYER_DIGEST = kept(LAYER)


def manifest(name):
    """The manifest of the image with this name."""
    name = name.rsplit("/", 1)[-1]
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
        "architecture": "amd64",
        "os": "linux",
        "author": name,
        "config": {"Cmd": command, "Env": ["PATH=/usr/sbin:/bin"], "User": USERS.get(name, "")},
        "rootfs": {"type": "layers", "diff_ids": [LAYER_DIGEST]},
    }).encode()
    return json.dumps({
        "schemaVersion": 2,
        "mediaType": KIND + "manifest.v1+json",
        "config": {"mediaType": KIND + "config.v1+json", "digest": kept(config), "size": len(config)},
        "layers": [{"mediaType": KIND + "layer.v1.tar", "digest": LAYER_DIGEST, "size": len(LAYER)}],
    }).encode()


class Registry(http.server.BaseHTTPRequestHandler):
    """Answers /v2/, /v2/NAME/manifests/TAG and /v2/NAME/blobs/DIGEST."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        content, kind = b"{}", "application/json"
        if len(parts) >= 4 and parts[-2] == "manifests":
            kind = KIND + "manifest.v1+json"
            content = BLOBS.get(parts[-1]) if ":" in parts[-1] else manifest("/".join(parts[1:-2]))
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


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Registry).serve_forever()
