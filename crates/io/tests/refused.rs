//! Machines that refuse io_uring or O_DIRECT, made with a seccomp filter on the test's own thread.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod support;

use esker_io::{Access, Disk, IoBackendKind, Layout, Options, Piece, ThisMachine};
use support::{assert_delivered, lay, pattern, pieces};

const IO_URING_SETUP: u32 = libc::SYS_io_uring_setup as u32;
const OPENAT: u32 = libc::SYS_openat as u32;

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn jump(test: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | test | libc::BPF_K) as u16, jt, jf, k }
}

fn errno(number: i32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | number as u32)
}

/// Puts a filter on this thread and the threads it starts; it stays until they end.
fn install(filter: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers, and a program that lives through the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let code = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program as *const _);
        assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
    }
}

fn refuse_io_uring() {
    install(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        jump(libc::BPF_JEQ, IO_URING_SETUP, 0, 1),
        errno(libc::EPERM),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ]);
}

/// As file systems do that refuse O_DIRECT when a file is opened.
fn refuse_direct() {
    install(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        jump(libc::BPF_JEQ, OPENAT, 0, 3),
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 32),
        jump(libc::BPF_JSET, libc::O_DIRECT as u32, 0, 1),
        errno(libc::EINVAL),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ]);
}

/// Reads, writes and streams where `refuse` has taken something away; says which I/O backend was taken and why.
fn check(directory: &std::path::Path, refuse: impl FnOnce() + Send) -> (IoBackendKind, String) {
    let layout = Layout::file(&directory.join("f"));
    let file = pattern(300_000, 1);
    lay(&layout, &file);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            refuse();
            let files =
                ThisMachine.open(std::slice::from_ref(&layout), Access::Write, &Options::default()).unwrap();
            let mut queue = files.queue().unwrap();
            let spans: Vec<(u64, u64)> = (0..700).map(|row| (row * 419, 400)).collect();
            let (pieces, bytes) = pieces(&spans, 0);
            let mut out = vec![0; bytes];
            queue.read(0, &pieces, &mut out).unwrap();
            assert_delivered(&pieces, &out, &file, "refused");
            let more = pattern(100_000, 5);
            queue.write(0, &[Piece { offset: 777, bytes: 100_000, at: 0 }], &more).unwrap();
            queue.sync().unwrap();
            let mut stream = esker_io::Stream::open(&files, 0, 777..100_777, 65_536, 2).unwrap();
            let mut got = Vec::new();
            std::io::Read::read_to_end(&mut stream, &mut got).unwrap();
            assert!(got == more);
            (files.io_backend().kind, files.io_backend().to_string())
        });
        work.join().unwrap()
    })
}

fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn without_io_uring_threads_read_and_say_why() {
    let directory = on_disk();
    let (kind, said) = check(directory.path(), refuse_io_uring);
    assert!(matches!(kind, IoBackendKind::PoolDirect | IoBackendKind::PoolBuffered), "{said}");
    assert!(said.contains("EPERM") && said.contains("seccomp"), "{said}");
}

#[test]
fn without_direct_io_the_page_cache_serves_and_says_why() {
    let directory = on_disk();
    let (kind, said) = check(directory.path(), refuse_direct);
    assert!(matches!(kind, IoBackendKind::UringBuffered | IoBackendKind::PoolBuffered), "{said}");
    assert!(said.contains("O_DIRECT"), "{said}");
}

#[test]
fn without_either_the_last_backend_works() {
    let directory = on_disk();
    let (kind, said) = check(directory.path(), || {
        refuse_direct();
        refuse_io_uring();
    });
    assert_eq!(kind, IoBackendKind::PoolBuffered, "{said}");
    assert!(said.contains("O_DIRECT") && said.contains("EPERM"), "{said}");
}

#[test]
fn tmpfs_works_whatever_it_refuses() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no tmpfs at /dev/shm");
        return;
    };
    let (kind, said) = check(directory.path(), || {});
    println!("tmpfs: {said}");
    if esker_io::direct_io(&directory.path().join("f")).is_err() {
        assert!(!kind.is_direct() && said.contains("O_DIRECT"), "{said}");
    }
}

#[test]
fn a_backend_that_was_asked_for_and_is_refused_is_an_error() {
    let directory = on_disk();
    let path = directory.path().join("f");
    std::fs::write(&path, [1; 4096]).unwrap();
    let error = std::thread::scope(|scope| {
        let open = || {
            refuse_io_uring();
            let options = Options { io_backend: Some(IoBackendKind::UringDirect), ..Options::default() };
            ThisMachine.open(&[Layout::file(&path)], Access::Read, &options).map(|_| ())
        };
        scope.spawn(open).join().unwrap().unwrap_err()
    });
    let said = error.to_string();
    assert!(said.contains("uring-direct") && said.contains("EPERM"), "{said}");
}
