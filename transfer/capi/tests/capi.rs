//! The C interface, used by a C program and by a C++ compiler that reads its header.
//!
//! Without a C compiler it says so and ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The shared library that was built for these tests.
fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let found =
        [deps.clone(), deps.parent().unwrap().to_owned()].map(|folder| folder.join("libputget_transfer_capi.so"));
    found.into_iter().find(|path| path.exists()).expect("libputget_transfer_capi.so was not built")
}

fn run(command: &mut Command) -> Option<String> {
    match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: there is no {:?}", command.get_program());
            None
        }
        output => {
            let output = output.unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command:?}: {errors}");
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
    }
}

/// Compiles a C program of this repository and calls `with_it` with its path; not where there is no compiler.
fn compiled(source: &str, with_it: impl Fn(&Path)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let name = Path::new(source).file_stem().unwrap().to_string_lossy().into_owned();
    let folder = std::env::temp_dir().join(format!("putget_transfer_{name}_{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (program, library) = (folder.join("program"), library());
    let mut compile = Command::new("cc");
    compile
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"])
        .arg(root.join("../python/putget_transfer/include"));
    compile.arg(root.join(source)).arg(&library).args(["-lpthread", "-o"]).arg(&program);
    compile.arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()));
    if run(&mut compile).is_some() {
        with_it(&program);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_c_program_transfers() {
    compiled("tests/capi_program.c", |program| {
        for provider in ["sim", "host", "tcp"] {
            assert_eq!(run(Command::new(program).arg(provider)), Some("all is well\n".into()), "{provider}");
        }
    });
}

#[test]
fn the_example_in_c_transfers() {
    compiled("../../examples/c/transfer.c", |program| {
        assert_eq!(run(&mut Command::new(program)), Some("keys and values\n".into()));
    });
}

#[test]
fn the_header_is_cpp_too_and_names_what_the_library_has() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/putget_transfer/include/putget_transfer.h");
    let mut check = Command::new("c++");
    run(check.args(["-std=c++17", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++"]).arg(&header));
    let text = std::fs::read_to_string(header).unwrap();
    let mut declared: Vec<_> = text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    declared.retain(|word| word.starts_with("pt_") && text.contains(&format!("{word}(")));
    declared.sort_unstable();
    declared.dedup();
    assert!(declared.len() > 46);
    let Some(symbols) = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library())) else { return };
    let mut defined: Vec<_> = symbols.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    defined.retain(|symbol| symbol.starts_with("pt_"));
    defined.sort_unstable();
    assert_eq!(declared, defined);
}
