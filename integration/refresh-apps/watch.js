// Prints the file's content at each event: fs.watch of the file or of its folder, or fs.watchFile, which polls.
const fs = require('fs')
const file = '/etc/app/app.conf'
const show = () => console.log('event ' + fs.readFileSync(file, 'utf8').trim())
// A watch of a file ends with the file.
const follow = () => fs.watch(file, kind => { show(); if (kind === 'rename') follow() })
switch (process.argv[2]) {
  case 'file': follow(); break
  case 'folder': fs.watch('/etc/app', show); break
  case 'poll': fs.watchFile(file, { interval: 200 }, show); break
}
console.log('started')
