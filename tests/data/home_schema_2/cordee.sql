BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0002');
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
	failure TEXT, refused BIGINT DEFAULT '0' NOT NULL, refused_why TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (job_id, epoch)
);
INSERT INTO "attempts" VALUES('first-vhzivf',1,'ended','{"local": [0]}',1795380814569186,1795380814651447,NULL,NULL,NULL,NULL,1795380815714749,'finished','every process exited with 0',NULL,0,'');
INSERT INTO "attempts" VALUES('woe-pg2tu5',1,'ended','{"local": [0]}',1795380820450436,1795380820521277,NULL,NULL,NULL,NULL,1795380820586782,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('woe-pg2tu5',2,'ended','{"local": [0]}',1795380820586782,1795380820631367,NULL,NULL,NULL,NULL,1795380820698541,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('woe-pg2tu5',3,'ended','{"local": [0]}',1795380820698541,1795380820779421,NULL,NULL,NULL,NULL,1795380820854837,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('last-hvagsu',1,'running','{"local": [0, 1]}',1795380826142200,1795380826218726,NULL,NULL,NULL,NULL,NULL,NULL,'',NULL,0,'');
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
INSERT INTO "jobs" VALUES('first-vhzivf','first','ada','default','standard',1,NULL,'done','finished',1,1795380814519307,1795380815714749,'{"run":["sleep","1"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"first","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{"PATH":"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","PYTHONPATH":"/home/ada/cordee/src"},"secrets":[],"cwd":"/home/ada"}');
INSERT INTO "jobs" VALUES('woe-pg2tu5','woe','ada','default','standard',1,NULL,'failed','3 attempts in a row without a checkpoint; woe-pg2tu5.3 rank 0 exited with 1',3,1795380820440626,1795380820854837,'{"run":["false"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"woe","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{"PATH":"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","PYTHONPATH":"/home/ada/cordee/src"},"secrets":[],"cwd":"/home/ada"}');
INSERT INTO "jobs" VALUES('last-hvagsu','last','ada','default','standard',2,NULL,'running','',1,1795380826126846,NULL,'{"run":["sleep","500"],"gpus":2,"gpu":null,"gpu_milli":1000,"version":1,"name":"last","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{"PATH":"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin","PYTHONPATH":"/home/ada/cordee/src"},"secrets":[],"cwd":"/home/ada"}');
CREATE TABLE log (
	number BIGINT NOT NULL, 
	at_us BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	job_id VARCHAR, 
	body TEXT NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "log" VALUES(1,1795380779372596,'ServerUp',NULL,'{"kind": "ServerUp", "at_us": 1795380779372596}');
INSERT INTO "log" VALUES(2,1795380779981489,'NodeUp',NULL,'{"kind": "NodeUp", "at_us": 1795380779981489, "node": {"name": "local", "epoch": 1, "gpu_name": "slot", "gpus": 2, "capacity": "on-demand", "micro_usd_per_gpu_hour": 0, "price_source": "CPU slots are not billed", "domain": [], "island_gpus": 0, "unavailable": [], "cpu_milli": null, "memory_bytes": null}}');
INSERT INTO "log" VALUES(3,1795380808943367,'QueuesSet',NULL,'{"kind": "QueuesSet", "at_us": 1795380808943367, "queues": [{"name": "team", "parent": null, "quota_gpus": 1, "limit_gpus": null, "lend": true, "weight": 1, "user_gpus": null, "gpu_us_per_day": null, "micro_usd_per_day": null}]}');
INSERT INTO "log" VALUES(4,1795380814519307,'JobSubmitted','first-vhzivf','{"kind": "JobSubmitted", "at_us": 1795380814519307, "job": {"job_id": "first-vhzivf", "name": "first", "owner": "ada", "gpus": 1, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null, "estimates": []}, "spec": "{\"run\":[\"sleep\",\"1\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"first\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"plan\":null,\"env\":{\"PATH\":\"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\",\"PYTHONPATH\":\"/home/ada/cordee/src\"},\"secrets\":[],\"cwd\":\"/home/ada\"}"}');
INSERT INTO "log" VALUES(5,1795380814569186,'AttemptPlaced','first-vhzivf','{"kind": "AttemptPlaced", "at_us": 1795380814569186, "job_id": "first-vhzivf", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(6,1795380814651447,'RanksStarted','first-vhzivf','{"kind": "RanksStarted", "at_us": 1795380814651447, "job_id": "first-vhzivf", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(7,1795380815686256,'RanksEnded','first-vhzivf','{"kind": "RanksEnded", "at_us": 1795380815686256, "job_id": "first-vhzivf", "epoch": 1, "node": "local", "outcome": "finished", "failure": null, "why": "every process exited with 0"}');
INSERT INTO "log" VALUES(8,1795380815714749,'AttemptEnded','first-vhzivf','{"kind": "AttemptEnded", "at_us": 1795380815714749, "job_id": "first-vhzivf", "epoch": 1, "outcome": "finished", "why": "every process exited with 0", "failure": null}');
INSERT INTO "log" VALUES(9,1795380815714749,'JobEnded','first-vhzivf','{"kind": "JobEnded", "at_us": 1795380815714749, "job_id": "first-vhzivf", "state": "done", "why": "finished"}');
INSERT INTO "log" VALUES(10,1795380820440626,'JobSubmitted','woe-pg2tu5','{"kind": "JobSubmitted", "at_us": 1795380820440626, "job": {"job_id": "woe-pg2tu5", "name": "woe", "owner": "ada", "gpus": 1, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null, "estimates": []}, "spec": "{\"run\":[\"false\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"woe\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"plan\":null,\"env\":{\"PATH\":\"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\",\"PYTHONPATH\":\"/home/ada/cordee/src\"},\"secrets\":[],\"cwd\":\"/home/ada\"}"}');
INSERT INTO "log" VALUES(11,1795380820450436,'AttemptPlaced','woe-pg2tu5','{"kind": "AttemptPlaced", "at_us": 1795380820450436, "job_id": "woe-pg2tu5", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(12,1795380820521277,'RanksStarted','woe-pg2tu5','{"kind": "RanksStarted", "at_us": 1795380820521277, "job_id": "woe-pg2tu5", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(13,1795380820555590,'RanksEnded','woe-pg2tu5','{"kind": "RanksEnded", "at_us": 1795380820555590, "job_id": "woe-pg2tu5", "epoch": 1, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(14,1795380820586782,'AttemptEnded','woe-pg2tu5','{"kind": "AttemptEnded", "at_us": 1795380820586782, "job_id": "woe-pg2tu5", "epoch": 1, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(15,1795380820586782,'AttemptPlaced','woe-pg2tu5','{"kind": "AttemptPlaced", "at_us": 1795380820586782, "job_id": "woe-pg2tu5", "epoch": 2, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(16,1795380820631367,'RanksStarted','woe-pg2tu5','{"kind": "RanksStarted", "at_us": 1795380820631367, "job_id": "woe-pg2tu5", "epoch": 2, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(17,1795380820658991,'RanksEnded','woe-pg2tu5','{"kind": "RanksEnded", "at_us": 1795380820658991, "job_id": "woe-pg2tu5", "epoch": 2, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(18,1795380820698541,'AttemptEnded','woe-pg2tu5','{"kind": "AttemptEnded", "at_us": 1795380820698541, "job_id": "woe-pg2tu5", "epoch": 2, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(19,1795380820698541,'AttemptPlaced','woe-pg2tu5','{"kind": "AttemptPlaced", "at_us": 1795380820698541, "job_id": "woe-pg2tu5", "epoch": 3, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(20,1795380820779421,'RanksStarted','woe-pg2tu5','{"kind": "RanksStarted", "at_us": 1795380820779421, "job_id": "woe-pg2tu5", "epoch": 3, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(21,1795380820818527,'RanksEnded','woe-pg2tu5','{"kind": "RanksEnded", "at_us": 1795380820818527, "job_id": "woe-pg2tu5", "epoch": 3, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(22,1795380820854837,'AttemptEnded','woe-pg2tu5','{"kind": "AttemptEnded", "at_us": 1795380820854837, "job_id": "woe-pg2tu5", "epoch": 3, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-pg2tu5.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(23,1795380820854837,'JobEnded','woe-pg2tu5','{"kind": "JobEnded", "at_us": 1795380820854837, "job_id": "woe-pg2tu5", "state": "failed", "why": "3 attempts in a row without a checkpoint; woe-pg2tu5.3 rank 0 exited with 1"}');
INSERT INTO "log" VALUES(24,1795380826126846,'JobSubmitted','last-hvagsu','{"kind": "JobSubmitted", "at_us": 1795380826126846, "job": {"job_id": "last-hvagsu", "name": "last", "owner": "ada", "gpus": 2, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null, "estimates": []}, "spec": "{\"run\":[\"sleep\",\"500\"],\"gpus\":2,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"last\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"plan\":null,\"env\":{\"PATH\":\"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\",\"PYTHONPATH\":\"/home/ada/cordee/src\"},\"secrets\":[],\"cwd\":\"/home/ada\"}"}');
INSERT INTO "log" VALUES(25,1795380826142200,'AttemptPlaced','last-hvagsu','{"kind": "AttemptPlaced", "at_us": 1795380826142200, "job_id": "last-hvagsu", "epoch": 1, "leases": [{"node": "local", "gpus": [0, 1], "milli": 1000}]}');
INSERT INTO "log" VALUES(26,1795380826218726,'RanksStarted','last-hvagsu','{"kind": "RanksStarted", "at_us": 1795380826218726, "job_id": "last-hvagsu", "epoch": 1, "node": "local", "launch": "one process per slot: 2 on this node, 2 in the gang (launch: auto)"}');
CREATE TABLE marks (
	source VARCHAR NOT NULL, 
	seq BIGINT NOT NULL, 
	PRIMARY KEY (source)
);
INSERT INTO "marks" VALUES('node/local/1',10);
CREATE INDEX ix_log_job_id ON log (job_id);
COMMIT;
