# Prints the file's content at each change of its folder, as watchdog's documentation shows it.
import time

from watchdog.events import FileSystemEventHandler
from watchdog.observers import Observer


class Show(FileSystemEventHandler):
    def on_modified(self, event):
        with open("/etc/app/app.conf") as file:
            print("event", file.read().strip(), flush=True)


observer = Observer()
observer.schedule(Show(), "/etc/app")
observer.start()
print("started", flush=True)
time.sleep(1000000)
