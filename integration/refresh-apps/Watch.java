import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardWatchEventKinds;
import java.nio.file.WatchKey;
import java.nio.file.WatchService;

/** Prints the file's content at each event of its folder: a WatchService cannot watch a file. */
class Watch {
    public static void main(String[] words) throws Exception {
        Path folder = Path.of("/etc/app");
        WatchService service = folder.getFileSystem().newWatchService();
        folder.register(service, StandardWatchEventKinds.ENTRY_CREATE, StandardWatchEventKinds.ENTRY_DELETE,
            StandardWatchEventKinds.ENTRY_MODIFY);
        System.out.println("started");
        while (true) {
            WatchKey key = service.take();
            key.pollEvents();
            System.out.println("event " + Files.readString(folder.resolve("app.conf")).strip());
            key.reset();
        }
    }
}
