#!/usr/bin/env bash
# Builds the images, starts the simulated cluster of docker-compose.yml, asks it, kills an instance and a planner with requests
# under way, and removes all of it. Needs Docker with docker-compose 1.29 or Compose v2, and the images of docker-compose.yml or others in
# their place (QLM_BASE_IMAGE, QLM_VALKEY_IMAGE). Ports 50051 and 8080 have to be free. Exit code: 0 all well, 1 not.
set -euo pipefail
cd "$(dirname "$0")/.."

if docker compose version > /dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(--project-name qlm-check --file docker-compose.yml --profile simulated)
requests=${REQUESTS:-20}

finish() {
    local code=$?
    ((code == 0)) || "${compose[@]}" logs --tail 40 || true
    "${compose[@]}" down --volumes --timeout 30
    exit "$code"
}
trap finish EXIT

in_gateway() { "${compose[@]}" exec -T gateway "$@"; }

# $1: seconds, $2: what is waited for; the rest is a command.
until_true() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" > /dev/null 2>&1; do
        ((SECONDS < deadline)) || { echo "not within its time: $what" >&2; return 1; }
        sleep 1
    done
    echo "$what"
}

all_healthy() {
    local id
    for id in $("${compose[@]}" ps -q); do
        # `keys` has no health: it has ended, well.
        [[ $(docker inspect --format '{{if .State.Health}}{{.State.Health.Status}}{{else}}{{.State.ExitCode}}{{end}}' "$id") =~ ^(healthy|0)$ ]] ||
            return 1
    done
}

"${compose[@]}" build
"${compose[@]}" up --detach
until_true 120 "all containers are healthy" all_healthy
in_gateway qlm submit --model mistral-7b --slo 60 --max-tokens 50 --json "Is anybody there?"
key=$(in_gateway cat /etc/qlm-keys/client.key)
curl --fail --silent --show-error --header "Authorization: Bearer $key" --header 'Content-Type: application/json' http://127.0.0.1:8080/v1/chat/completions --data \
    '{"model": "mistral-7b", "max_tokens": 5, "messages": [{"role": "user", "content": "And over HTTP?"}]}' > /dev/null

in_gateway python -c "
import qlm
from qlm.credentials import credentials_of
with qlm.Client(['127.0.0.1:50051'], credentials=credentials_of()) as client:
    for number in range($requests):
        client.submit('mistral-7b', f'Tell me about number {number}.', slo_s=600.0, max_tokens=400, request_id=f'check-{number}')
"
for service in agent-a100-0 planner; do
    docker kill "$("${compose[@]}" ps -q "$service")" > /dev/null
done
echo "an instance and a planner are killed with $requests requests accepted"
in_gateway python -c "
import qlm
from qlm.credentials import credentials_of
with qlm.Client(['127.0.0.1:50051'], credentials=credentials_of()) as client:
    for number in range($requests):
        result = client.result(f'check-{number}', wait_s=120)
        assert result is not None and result.state == qlm.RequestState.COMPLETED, (number, result)
        assert 0 < result.output_tokens == len(result.token_ids), (number, result)
"
echo "all of them are completed, once"
"${compose[@]}" up --detach
until_true 120 "all containers are healthy again" all_healthy
in_gateway qlm status
