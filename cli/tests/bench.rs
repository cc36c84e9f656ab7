//! `raccl bench` between real processes.

mod support;

use std::fs;

use serde_json::Value;
use support::{Done, raccl, run};
use tempfile::TempDir;

/// `raccl bench ARGUMENTS`, with few calls.
fn bench(arguments: &str) -> Done {
    run(raccl().arg("bench").args(arguments.split(' ')).args(["--iters", "2", "--warmup", "1"]))
}

/// The lines of a `--json -`.
fn lines(done: &Done) -> Vec<Value> {
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    done.stdout.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

#[test]
fn four_ranks_give_a_verified_table() {
    let done = bench("all-reduce -n 4 --check -e 64K");
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let rows: Vec<Vec<&str>> = done
        .stdout
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let sizes: Vec<u64> = rows.iter().map(|row| row[0].parse().expect("a size")).collect();
    assert_eq!(sizes, (2..=16).map(|power| 1 << power).collect::<Vec<u64>>());
    for row in rows {
        assert_eq!(row.len(), 11, "{row:?}");
        assert_eq!(row[1].parse::<u64>().expect("a count") * 4, row[0].parse::<u64>().expect("a size"));
        assert!(row[4].parse::<f64>().expect("a time") > 0.0);
        assert_eq!(row[10], "0", "no wrong element");
    }
    assert!(done.stdout.ends_with("every element of every size is right\n"), "{done:?}");
}

#[test]
fn every_operation_is_verified_and_has_its_sizes() {
    for (operation, element, sizes) in [
        ("all-reduce", 4, &[4, 32, 256, 2048][..]),
        // Parts for three ranks, and none that are empty.
        ("all-gather", 4, &[24, 252, 2040]),
        ("reduce-scatter", 4, &[24, 252, 2040]),
        ("broadcast", 4, &[4, 32, 256, 2048]),
        ("barrier", 4, &[0]),
        ("send-recv", 4, &[4, 32, 256, 2048]),
        ("ping-pong", 4, &[4, 32, 256, 2048]),
    ] {
        let done = bench(&format!("{operation} -n 3 -b 4 -e 2K -f 8 --check --json -"));
        let lines = lines(&done);
        let found: Vec<_> = lines.iter().map(|line| line["bytes"].as_u64().expect("a number")).collect();
        assert_eq!(found, sizes, "{operation}");
        for line in lines {
            assert_eq!(line["op"], operation.replace('-', "_"));
            assert_eq!((&line["checked"], &line["wrong"]), (&Value::Bool(true), &Value::from(0)), "{line}");
            assert_eq!(
                line["count"].as_u64().expect("a number") * element,
                line["bytes"].as_u64().expect("a number")
            );
            assert_eq!((&line["ranks"], &line["dtype"]), (&Value::from(3), &Value::from("f32")));
            let time = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"));
            assert!(0.0 < time("batch_min_us") && time("batch_min_us") <= time("batch_median_us"), "{line}");
            assert!(time("p50_us") <= time("p99_us") && time("p99_us") <= time("max_us"), "{line}");
            // Both are rounded to a megabyte a second, which is much for small sizes on a busy machine.
            assert!(time("algbw_gbs") + 0.002 >= time("busbw_gbs") * 0.7, "{line}");
            assert!(line["links"].as_array().is_some_and(|links| !links.is_empty()), "{line}");
            assert!(line["algorithm"].is_string() && line["reduce"].is_string(), "{line}");
        }
    }
}

#[test]
fn types_and_reductions_are_verified() {
    for (dtype, reduce) in
        [("bf16", "avg"), ("f16", "sum"), ("i8", "bit_xor"), ("u64", "max"), ("c64", "prod")]
    {
        let done =
            bench(&format!("all-reduce -n 3 -d {dtype} -o {reduce} -b 16 -e 64K -f 64 --check --json -"));
        for line in lines(&done) {
            assert_eq!((&line["dtype"], &line["reduce"]), (&Value::from(dtype), &Value::from(reduce)));
            assert_eq!(line["wrong"], 0, "{line}");
        }
    }
}

#[test]
fn wanted_links_and_algorithms_are_used() {
    let done =
        bench("all-reduce -n 2 --link tcp --algorithm recursive_doubling -b 1K -e 1M -f 1024 --json -");
    for line in lines(&done) {
        assert_eq!(line["links"], serde_json::json!(["tcp"]));
        assert_eq!(
            (&line["algorithm"], &line["checked"]),
            (&Value::from("recursive_doubling"), &Value::Bool(false))
        );
    }
}

#[test]
fn registered_buffers_are_used_where_they_are_over_cables_and_nowhere_else() {
    for (link, copied) in [("--emulate mesh", false), ("--link tcp", true)] {
        let done = bench(&format!("all-gather -n 2 -b 8M -e 8M --check --registered {link}"));
        let last = done.stdout.lines().last().expect("a last line");
        let nothing = last.contains(" sent 0 bytes") && last.contains(" received 0 ");
        assert!(last.contains("without a copy") && nothing == copied, "{done:?}");
        assert!(done.stdout.contains("every element of every size is right"), "{done:?}");
    }
}

#[test]
fn a_file_gets_the_json_besides_the_table() {
    let directory = TempDir::new().expect("a directory");
    let file = directory.path().join("figures");
    let done = run(raccl().args(["bench", "barrier", "-n", "2", "--iters", "2", "--json"]).arg(&file));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    assert!(done.stdout.contains("barrier"));
    let text = fs::read_to_string(&file).expect("a file");
    assert_eq!(serde_json::from_str::<Value>(&text).expect("one object")["op"], "barrier");
}

#[test]
fn without_ranks_it_joins_the_group_of_the_environment() {
    let alone = bench("all-reduce -b 1K -e 1K --check --json -");
    assert_eq!(lines(&alone)[0]["ranks"], 1);
    let command = env!("CARGO_BIN_EXE_raccl");
    let done = run(raccl()
        .args(["launch", "-n", "2", "--", command, "bench", "all-gather", "-b", "1K", "-e", "1K"])
        .args(["--check", "--json", "-", "--iters", "2"]));
    assert_eq!((done.status, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let line: Value =
        serde_json::from_str(done.stdout.strip_prefix("[0] ").expect("rank 0")).expect("an object");
    assert_eq!((&line["ranks"], &line["wrong"]), (&Value::from(2), &Value::from(0)));
}

#[test]
fn a_wrong_element_is_a_failure() {
    // Two ranks that agree on lengths and not on what is in them.
    let script = r#"
        case $RACCL_RANK in 0) type=u32 ;; *) type=f32 ;; esac
        exec "$0" bench all-gather -d $type -b 1K -e 1K --check --iters 2"#;
    let done =
        run(raccl().args(["launch", "-n", "2", "--", "sh", "-c", script, env!("CARGO_BIN_EXE_raccl")]));
    assert_eq!(done.status, Some(1), "{done:?}");
    assert!(
        done.stdout.contains("elements are WRONG") && done.stderr.contains("elements are wrong"),
        "{done:?}"
    );
}

#[test]
fn emulated_cables_carry_a_verified_table() {
    for (ranks, cables, links) in
        [(2, "mesh", "verbs"), (2, "mesh,cables=3,latency=5us", "verbs"), (4, "ring", "verbs+tcp")]
    {
        let done =
            bench(&format!("all-reduce -n {ranks} --emulate {cables} -b 4 -e 1M -f 64 --check --json -"));
        let lines = lines(&done);
        assert_eq!(lines.len(), 4, "{cables}");
        for line in lines {
            assert_eq!(line["wrong"], 0, "{cables}: {line}");
            let found: Vec<&str> =
                line["links"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
            assert_eq!(found.join("+"), links, "{cables}: {line}");
        }
    }
}

#[test]
fn a_launched_group_uses_the_emulated_cables() {
    let program = env!("CARGO_BIN_EXE_raccl");
    let group = ["launch", "-n", "2", "--emulate", "mesh", "--", program, "bench", "barrier", "--iters", "2"];
    let done = run(raccl().args(group));
    assert_eq!(done.status, Some(0), "{done:?}");
    assert!(done.stdout.contains(" verbs "), "{done:?}");
}

#[test]
fn what_cannot_be_measured_is_said_in_one_line() {
    for (arguments, status, words) in [
        ("all-reduce -n 2 -o bit_and", 2, "bit_and has no meaning"),
        ("ping-pong -n 1", 2, "two ranks"),
        ("send-recv", 2, "two ranks"),
        ("all-reduce -n 2 -b 2K -e 1K", 2, "-b 2048"),
        ("all-reduce -n 2 --algorithm pigeons", 2, "pigeons"),
        ("all-reduce -n 2 -e 64T", 1, "no memory"),
        ("barrier --json /no/such/file", 1, "/no/such/file"),
    ] {
        let done = bench(arguments);
        assert_eq!(done.status, Some(status), "{arguments}: {done:?}");
        let own = done.stderr.lines().filter(|line| !line.contains("exited with status"));
        assert!(own.clone().all(|line| line.contains(words)) && own.count() >= 1, "{arguments}: {done:?}");
        assert!(!done.stderr.contains("panicked"), "{done:?}");
    }
    let done = run(raccl().args(["bench", "barrier", "-n", "3"]).env("RACCL_TIMEOUT", "soon"));
    assert_eq!((done.status, done.stderr.lines().count()), (Some(2), 1), "{done:?}");
    for usage in [
        "flying",
        "all-reduce -b x",
        "all-reduce -d f3",
        "all-reduce -f 1",
        "barrier --emulate mesh",
        "barrier -n 2 --emulate cube",
    ] {
        let done = bench(usage);
        assert_eq!(done.status, Some(2), "{usage}: {done:?}");
    }
}
