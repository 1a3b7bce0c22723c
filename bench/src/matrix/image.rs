//! The disk image of the uring jobs. Every block is written once with data: a hole, or an extent
//! that was only allocated, is read without the disk, and would be measured as such.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::MatrixError;
use crate::pattern::Rng;

/// Size of the image.
pub const IMAGE_MIB: u64 = 512;

/// Makes sure that there is an image of `mib` MiB at `path`, written through to the disk.
pub fn ensure(path: &Path, mib: u64) -> Result<(), MatrixError> {
    if fs::metadata(path).is_ok_and(|found| is_whole(&found, mib)) {
        return Ok(());
    }
    eprintln!("usurp-matrix: writing {mib} MiB to {}", path.display());
    write(path, mib).map_err(MatrixError::file(path))
}

/// An interrupted write left a shorter file; a sparse one has fewer blocks than its length.
fn is_whole(found: &fs::Metadata, mib: u64) -> bool {
    found.is_file() && found.len() == mib << 20 && found.blocks() * 512 >= found.len()
}

fn write(path: &Path, mib: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let mut rng = Rng::new(mib);
    let mut chunk = vec![0u8; 1 << 20];
    for _ in 0..mib {
        chunk.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = rng.bits().to_le_bytes());
        file.write_all(&chunk)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_written_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        ensure(&path, 2).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.len(), 2 << 20);
        ensure(&path, 2).unwrap();
        let again = fs::metadata(&path).unwrap();
        assert_eq!(first.modified().unwrap(), again.modified().unwrap());
    }

    #[test]
    fn short_and_sparse_files_are_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        File::create(&path).unwrap().set_len(2 << 20).unwrap();
        assert!(!is_whole(&fs::metadata(&path).unwrap(), 2), "a hole is no data");
        ensure(&path, 2).unwrap();
        let data = fs::read(&path).unwrap();
        assert!(data.as_chunks::<4096>().0.iter().all(|block| block != &[0; 4096]));
        ensure(&path, 3).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 3 << 20);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = ensure(Path::new("/nowhere/disk.img"), 1).unwrap_err().to_string();
        assert!(error.contains("/nowhere/disk.img"), "{error}");
    }
}
