"""What tests share: models, ways to run them, servers, and programs that attack.

Small models and what reads their results:
  line: one weight that learns y = 2x; its numbers can be checked by hand. The first choice.
  models: one tiny model_fn for each style of writing one; classic_models: the style of TensorFlow 1.
  sparse_models, weighted_models, measured, tracked, export_models: gradients by rows; losses that are sums or weighted
    means; metrics of each kind; what a user logs himself; what is exported.
  head_cases, premade_cases: heads and premade estimators, with reference values of TensorFlow 2.15 in tests/data.
  checkpoints, journal, screen: read what a run left: checkpoints, events.*.jsonl, lines on the screen.

Ways to run something, the cheapest first. CPU seconds of one run:
  Estimator in the test itself (line.py, models.py)                   0.1 to 0.5
  jobs, trained: a task in the process of the test; a copy of one      0.3, 0
  command_line: a whole command; its tasks are forked from one server  1
  shipping: ships journals from forked processes                      0.1
  gang, worker_cases, gang_task: workers that train together; gangs of one environment are one
  parameter_server_cases, _models, _evaluations: one cluster of parameter servers, and what it is asked to do
  evaluator, hold, killed, forking, served_tasks: other lives of a task
  on_gpu: what trains on two logical GPUs of one card, or in a rehearsal on two logical CPUs
  python -m runner, if the process is the point                       5, with MLflow 8

Servers and machines:
  outages: a tracker that fails on demand; browser, team: MLflow in Chromium, and with PostgreSQL and S3
  object_store, emulators: S3 behind a proxy that fails; Google's and Azure's stores
  hosts, networks, slurm: hosts of network namespaces; a Slurm of two nodes
  served, wheel, users_project: exported models served; the wheel in an empty environment; a project of a user

Programs that attack, each with a seed, some starts of which are tests: `python -m tests.support.<name>`
  bad_overrides, mutations: command lines with a mistake; with random values
  chains, kills, lost_workers: random starts, kills and losses, compared with runs that nobody disturbs
  store_damage: damage to a bucket and its folder between starts
  mutants: faults in our own code: which do tests find?

About the tests themselves:
  messages: the texts that tests meet, in messages.txt of each folder; tiers: which cases are slow
  processes: what a test started, and waits for; cost: what each test costs
"""
