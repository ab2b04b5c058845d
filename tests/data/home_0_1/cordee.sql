BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE attempts (
	job_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	leases TEXT NOT NULL, 
	placed_us BIGINT NOT NULL, 
	started_us BIGINT, 
	notice_us BIGINT, 
	notice_reason VARCHAR, 
	step BIGINT, 
	checkpoint_step BIGINT, 
	ended_us BIGINT, 
	outcome VARCHAR, 
	why TEXT NOT NULL, 
	failure TEXT, 
	PRIMARY KEY (job_id, epoch)
);
INSERT INTO "attempts" VALUES('first-jx6d95',1,'ended','{"local": [0]}',1700355811351327,1700355811427264,1700355813469660,'share',5,5,1700355813566554,'checkpointed','every rank left with a checkpoint',NULL);
INSERT INTO "attempts" VALUES('first-jx6d95',2,'ended','{"local": [0]}',1700355820787360,1700355820864404,NULL,NULL,5,5,1700355821406783,'finished','every process exited with 0',NULL);
INSERT INTO "attempts" VALUES('woe-799fpc',1,'ended','{"local": [0]}',1700355824909036,1700355824955504,NULL,NULL,NULL,NULL,1700355825014459,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}');
INSERT INTO "attempts" VALUES('woe-799fpc',2,'ended','{"local": [0]}',1700355825014459,1700355825072366,NULL,NULL,NULL,NULL,1700355825118680,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}');
INSERT INTO "attempts" VALUES('woe-799fpc',3,'ended','{"local": [0]}',1700355825118680,1700355825173949,NULL,NULL,NULL,NULL,1700355825225637,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}');
INSERT INTO "attempts" VALUES('last-aghxr9',1,'running','{"local": [0]}',1700355828227902,1700355828316742,NULL,NULL,NULL,NULL,NULL,NULL,'',NULL);
CREATE TABLE commands (
	number BIGINT NOT NULL, 
	job_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	PRIMARY KEY (number)
);
CREATE TABLE jobs (
	job_id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	queue VARCHAR NOT NULL, 
	tier VARCHAR NOT NULL, 
	gpus INTEGER NOT NULL, 
	gpu_name VARCHAR, 
	state VARCHAR NOT NULL, 
	why TEXT NOT NULL, 
	epoch INTEGER NOT NULL, 
	submitted_us BIGINT NOT NULL, 
	ended_us BIGINT, 
	spec TEXT NOT NULL, 
	PRIMARY KEY (job_id)
);
INSERT INTO "jobs" VALUES('first-jx6d95','first','root','team','standard',1,NULL,'done','finished',2,1700355811339793,1700355821406783,'{"run":["/usr/bin/python3","/srv/train.py"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"first","launch":"auto","tier":"standard","capacity":"any","queue":"team","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"env":{"PATH":"/usr/bin:/bin","PYTHONPATH":"/srv/cordee"},"secrets":[],"cwd":"/tmp"}');
INSERT INTO "jobs" VALUES('woe-799fpc','woe','root','default','standard',1,NULL,'failed','3 attempts in a row without a checkpoint; woe-799fpc.3 rank 0 exited with 1',3,1700355824898317,1700355825225637,'{"run":["false"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"woe","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"env":{"PATH":"/usr/bin:/bin","PYTHONPATH":"/srv/cordee"},"secrets":[],"cwd":"/tmp"}');
INSERT INTO "jobs" VALUES('last-aghxr9','last','root','default','standard',1,NULL,'running','',1,1700355828208817,NULL,'{"run":["sleep","600"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"last","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"env":{"PATH":"/usr/bin:/bin","PYTHONPATH":"/srv/cordee"},"secrets":[],"cwd":"/tmp"}');
CREATE TABLE log (
	number BIGINT NOT NULL, 
	at_us BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	job_id VARCHAR, 
	body TEXT NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "log" VALUES(1,1700355805283005,'ServerUp',NULL,'{"kind": "ServerUp", "at_us": 1700355805283005}');
INSERT INTO "log" VALUES(2,1700355806058676,'NodeUp',NULL,'{"kind": "NodeUp", "at_us": 1700355806058676, "node": {"name": "local", "epoch": 1, "gpu_name": "slot", "gpus": 2, "capacity": "on-demand", "micro_usd_per_gpu_hour": 2990000, "price_source": "each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)", "domain": [], "island_gpus": 0, "unavailable": [], "cpu_milli": null, "memory_bytes": null}}');
INSERT INTO "log" VALUES(3,1700355808508426,'QueuesSet',NULL,'{"kind": "QueuesSet", "at_us": 1700355808508426, "queues": [{"name": "team", "parent": null, "quota_gpus": 1, "limit_gpus": null, "lend": true, "weight": 2, "user_gpus": null, "gpu_us_per_day": null, "micro_usd_per_day": null}]}');
INSERT INTO "log" VALUES(4,1700355811339793,'JobSubmitted','first-jx6d95','{"kind": "JobSubmitted", "at_us": 1700355811339793, "job": {"job_id": "first-jx6d95", "name": "first", "owner": "root", "gpus": 1, "queue": "team", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null}, "spec": "{\"run\":[\"/usr/bin/python3\",\"/srv/train.py\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"first\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"team\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"env\":{\"PATH\":\"/usr/bin:/bin\",\"PYTHONPATH\":\"/srv/cordee\"},\"secrets\":[],\"cwd\":\"/tmp\"}"}');
INSERT INTO "log" VALUES(5,1700355811351327,'AttemptPlaced','first-jx6d95','{"kind": "AttemptPlaced", "at_us": 1700355811351327, "job_id": "first-jx6d95", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(6,1700355811427264,'RanksStarted','first-jx6d95','{"kind": "RanksStarted", "at_us": 1700355811427264, "job_id": "first-jx6d95", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(7,1700355811671526,'Restored','first-jx6d95','{"kind": "Restored", "at_us": 1700355811671526, "job_id": "first-jx6d95", "epoch": 1, "step": 0, "generation": null}');
INSERT INTO "log" VALUES(8,1700355811874152,'Reported','first-jx6d95','{"kind": "Reported", "at_us": 1700355811874152, "job_id": "first-jx6d95", "epoch": 1, "span": "useful", "from_us": 1700355811671523, "first_step": 0, "steps": 5, "tokens": 100, "loss": 1.5}');
INSERT INTO "log" VALUES(9,1700355811874352,'CheckpointCommitted','first-jx6d95','{"kind": "CheckpointCommitted", "at_us": 1700355811874352, "job_id": "first-jx6d95", "epoch": 1, "step": 5, "generation": 1, "size_bytes": 10, "stall_us": 1, "drain_us": 1000}');
INSERT INTO "log" VALUES(10,1700355813467909,'ServerDraining',NULL,'{"kind": "ServerDraining", "at_us": 1700355813467909}');
INSERT INTO "log" VALUES(11,1700355813469660,'NoticeGiven','first-jx6d95','{"kind": "NoticeGiven", "at_us": 1700355813469660, "job_id": "first-jx6d95", "epoch": 1, "reason": "share", "deadline_us": 1700355843469660, "for_job": null, "gpus": null, "expected_loss_micro_usd": 51159}');
INSERT INTO "log" VALUES(12,1700355813502331,'RankLeft','first-jx6d95','{"kind": "RankLeft", "at_us": 1700355813502331, "job_id": "first-jx6d95", "epoch": 1, "rank": 0, "how": "checkpointed", "step": 5}');
INSERT INTO "log" VALUES(13,1700355813560585,'ShareEnded','first-jx6d95','{"kind": "ShareEnded", "at_us": 1700355813560585, "job_id": "first-jx6d95", "epoch": 1, "node": "local", "outcome": "checkpointed", "failure": null, "why": "every rank left with a checkpoint"}');
INSERT INTO "log" VALUES(14,1700355813566554,'AttemptEnded','first-jx6d95','{"kind": "AttemptEnded", "at_us": 1700355813566554, "job_id": "first-jx6d95", "epoch": 1, "outcome": "checkpointed", "why": "every rank left with a checkpoint", "failure": null}');
INSERT INTO "log" VALUES(15,1700355813810677,'NodeDown',NULL,'{"kind": "NodeDown", "at_us": 1700355813810677, "node": "local", "epoch": 1, "why": "its agent is gone"}');
INSERT INTO "log" VALUES(16,1700355820094304,'ServerUp',NULL,'{"kind": "ServerUp", "at_us": 1700355820094304}');
INSERT INTO "log" VALUES(17,1700355820766579,'NodeUp',NULL,'{"kind": "NodeUp", "at_us": 1700355820766579, "node": {"name": "local", "epoch": 2, "gpu_name": "slot", "gpus": 2, "capacity": "on-demand", "micro_usd_per_gpu_hour": 2990000, "price_source": "each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)", "domain": [], "island_gpus": 0, "unavailable": [], "cpu_milli": null, "memory_bytes": null}}');
INSERT INTO "log" VALUES(18,1700355820787360,'AttemptPlaced','first-jx6d95','{"kind": "AttemptPlaced", "at_us": 1700355820787360, "job_id": "first-jx6d95", "epoch": 2, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(19,1700355820864404,'RanksStarted','first-jx6d95','{"kind": "RanksStarted", "at_us": 1700355820864404, "job_id": "first-jx6d95", "epoch": 2, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(20,1700355821122328,'Restored','first-jx6d95','{"kind": "Restored", "at_us": 1700355821122328, "job_id": "first-jx6d95", "epoch": 2, "step": 0, "generation": null}');
INSERT INTO "log" VALUES(21,1700355821322590,'Reported','first-jx6d95','{"kind": "Reported", "at_us": 1700355821322590, "job_id": "first-jx6d95", "epoch": 2, "span": "useful", "from_us": 1700355821122324, "first_step": 0, "steps": 5, "tokens": 100, "loss": 1.5}');
INSERT INTO "log" VALUES(22,1700355821322911,'CheckpointCommitted','first-jx6d95','{"kind": "CheckpointCommitted", "at_us": 1700355821322911, "job_id": "first-jx6d95", "epoch": 2, "step": 5, "generation": 1, "size_bytes": 10, "stall_us": 1, "drain_us": 1000}');
INSERT INTO "log" VALUES(23,1700355821323154,'RankLeft','first-jx6d95','{"kind": "RankLeft", "at_us": 1700355821323154, "job_id": "first-jx6d95", "epoch": 2, "rank": 0, "how": "finished", "step": 5}');
INSERT INTO "log" VALUES(24,1700355821380716,'ShareEnded','first-jx6d95','{"kind": "ShareEnded", "at_us": 1700355821380716, "job_id": "first-jx6d95", "epoch": 2, "node": "local", "outcome": "finished", "failure": null, "why": "every process exited with 0"}');
INSERT INTO "log" VALUES(25,1700355821406783,'AttemptEnded','first-jx6d95','{"kind": "AttemptEnded", "at_us": 1700355821406783, "job_id": "first-jx6d95", "epoch": 2, "outcome": "finished", "why": "every process exited with 0", "failure": null}');
INSERT INTO "log" VALUES(26,1700355821406783,'JobEnded','first-jx6d95','{"kind": "JobEnded", "at_us": 1700355821406783, "job_id": "first-jx6d95", "state": "done", "why": "finished"}');
INSERT INTO "log" VALUES(27,1700355824898317,'JobSubmitted','woe-799fpc','{"kind": "JobSubmitted", "at_us": 1700355824898317, "job": {"job_id": "woe-799fpc", "name": "woe", "owner": "root", "gpus": 1, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null}, "spec": "{\"run\":[\"false\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"woe\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"env\":{\"PATH\":\"/usr/bin:/bin\",\"PYTHONPATH\":\"/srv/cordee\"},\"secrets\":[],\"cwd\":\"/tmp\"}"}');
INSERT INTO "log" VALUES(28,1700355824909036,'AttemptPlaced','woe-799fpc','{"kind": "AttemptPlaced", "at_us": 1700355824909036, "job_id": "woe-799fpc", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(29,1700355824955504,'RanksStarted','woe-799fpc','{"kind": "RanksStarted", "at_us": 1700355824955504, "job_id": "woe-799fpc", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(30,1700355824976401,'ShareEnded','woe-799fpc','{"kind": "ShareEnded", "at_us": 1700355824976401, "job_id": "woe-799fpc", "epoch": 1, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(31,1700355825014459,'AttemptEnded','woe-799fpc','{"kind": "AttemptEnded", "at_us": 1700355825014459, "job_id": "woe-799fpc", "epoch": 1, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(32,1700355825014459,'AttemptPlaced','woe-799fpc','{"kind": "AttemptPlaced", "at_us": 1700355825014459, "job_id": "woe-799fpc", "epoch": 2, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(33,1700355825072366,'RanksStarted','woe-799fpc','{"kind": "RanksStarted", "at_us": 1700355825072366, "job_id": "woe-799fpc", "epoch": 2, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(34,1700355825090266,'ShareEnded','woe-799fpc','{"kind": "ShareEnded", "at_us": 1700355825090266, "job_id": "woe-799fpc", "epoch": 2, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(35,1700355825118680,'AttemptEnded','woe-799fpc','{"kind": "AttemptEnded", "at_us": 1700355825118680, "job_id": "woe-799fpc", "epoch": 2, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(36,1700355825118680,'AttemptPlaced','woe-799fpc','{"kind": "AttemptPlaced", "at_us": 1700355825118680, "job_id": "woe-799fpc", "epoch": 3, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(37,1700355825173949,'RanksStarted','woe-799fpc','{"kind": "RanksStarted", "at_us": 1700355825173949, "job_id": "woe-799fpc", "epoch": 3, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(38,1700355825190765,'ShareEnded','woe-799fpc','{"kind": "ShareEnded", "at_us": 1700355825190765, "job_id": "woe-799fpc", "epoch": 3, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(39,1700355825225637,'AttemptEnded','woe-799fpc','{"kind": "AttemptEnded", "at_us": 1700355825225637, "job_id": "woe-799fpc", "epoch": 3, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-799fpc.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(40,1700355825225637,'JobEnded','woe-799fpc','{"kind": "JobEnded", "at_us": 1700355825225637, "job_id": "woe-799fpc", "state": "failed", "why": "3 attempts in a row without a checkpoint; woe-799fpc.3 rank 0 exited with 1"}');
INSERT INTO "log" VALUES(41,1700355828208817,'JobSubmitted','last-aghxr9','{"kind": "JobSubmitted", "at_us": 1700355828208817, "job": {"job_id": "last-aghxr9", "name": "last", "owner": "root", "gpus": 1, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null}, "spec": "{\"run\":[\"sleep\",\"600\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"last\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"env\":{\"PATH\":\"/usr/bin:/bin\",\"PYTHONPATH\":\"/srv/cordee\"},\"secrets\":[],\"cwd\":\"/tmp\"}"}');
INSERT INTO "log" VALUES(42,1700355828227902,'AttemptPlaced','last-aghxr9','{"kind": "AttemptPlaced", "at_us": 1700355828227902, "job_id": "last-aghxr9", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(43,1700355828316742,'RanksStarted','last-aghxr9','{"kind": "RanksStarted", "at_us": 1700355828316742, "job_id": "last-aghxr9", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
CREATE TABLE marks (
	source VARCHAR NOT NULL, 
	seq BIGINT NOT NULL, 
	PRIMARY KEY (source)
);
INSERT INTO "marks" VALUES('node/local/1',3);
INSERT INTO "marks" VALUES('first-jx6d95.1/rank0',4);
INSERT INTO "marks" VALUES('server/local/1',1);
INSERT INTO "marks" VALUES('node/local/2',10);
INSERT INTO "marks" VALUES('first-jx6d95.2/rank0',4);
CREATE INDEX ix_log_job_id ON log (job_id);
COMMIT;
