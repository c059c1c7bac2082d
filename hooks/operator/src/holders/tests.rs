use super::*;

fn table(lines: &str) -> MountTable {
    MountTable::from_mountinfo(lines.as_bytes()).unwrap()
}

const HOST: &str = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n2 1 8:2 / /mnt/disk rw shared:2 - ext4 /dev/sdb rw\n";
const CONTAINER: &str = "11 10 0:50 / / rw - overlay overlay rw\n12 11 8:1 / /host rw - ext4 /dev/sda1 rw\n13 12 8:2 / /host/mnt/disk rw - ext4 /dev/sdb rw\n14 11 8:2 /sub /data rw - ext4 /dev/sdb rw\n";

fn found(wanted: &MountsToFind, table: &MountTable) -> Vec<u32> {
    let index = MountIndex::of(table);
    table
        .entries()
        .iter()
        .filter(|entry| wanted.is(entry, &index))
        .map(|entry| entry.id.0)
        .collect()
}

#[test]
fn a_copy_and_a_bind_of_a_part_show_the_same() {
    let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &table(HOST));
    assert_eq!(found(&wanted, &table(CONTAINER)), [13, 14]);
    assert_eq!(
        found(
            &MountsToFind::of_device(Device { major: 8, minor: 2 }),
            &table(CONTAINER)
        ),
        [13, 14]
    );
}

#[test]
fn a_mount_that_is_unmounted_here_is_found_by_the_path_that_it_covers() {
    let unmounted = table("1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n");
    let wanted = MountsToFind::at_or_below(Path::new("/mnt/disk"), &unmounted);
    assert_eq!(found(&wanted, &table(CONTAINER)), [13]);
    let elsewhere = MountsToFind::at_or_below(Path::new("/mnt/other"), &unmounted);
    assert_eq!(found(&elsewhere, &table(CONTAINER)), Vec::<u32>::new());
}
