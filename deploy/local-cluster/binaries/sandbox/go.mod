module trainwright.dev/local-cluster/sandbox

go 1.24.0
