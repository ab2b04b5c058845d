BEGIN TRANSACTION;
CREATE TABLE agents (
	node VARCHAR NOT NULL, 
	token_hash VARCHAR NOT NULL, 
	machine VARCHAR NOT NULL, 
	joined_us BIGINT NOT NULL, 
	"by" VARCHAR NOT NULL, 
	left_us BIGINT, 
	PRIMARY KEY (node), 
	UNIQUE (token_hash)
);
INSERT INTO "agents" VALUES('gpu-1','1111111111111111111111111111111111111111111111111111111111111111','gpu-1/abc',1795388417750795,'ada',NULL);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0005');
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
INSERT INTO "attempts" VALUES('first-ka3df6',1,'ended','{"local": [0, 1]}',1795388416700279,1795388416743104,NULL,NULL,NULL,NULL,1795388416839698,'finished','every process exited with 0',NULL,0,'');
INSERT INTO "attempts" VALUES('woe-76s46r',1,'ended','{"local": [0]}',1795388416839698,1795388416903233,NULL,NULL,NULL,NULL,1795388416966764,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.1 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('woe-76s46r',2,'ended','{"local": [0]}',1795388416966764,1795388417007456,NULL,NULL,NULL,NULL,1795388417058671,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('woe-76s46r',3,'ended','{"local": [0]}',1795388417058671,1795388417108933,NULL,NULL,NULL,NULL,1795388417166799,'failed','rank 0 exited with 1','{"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}',0,'');
INSERT INTO "attempts" VALUES('last-biutq4',1,'running','{"local": [0]}',1795388423938908,1795388424050897,NULL,NULL,NULL,NULL,NULL,NULL,'',NULL,0,'');
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
INSERT INTO "jobs" VALUES('first-ka3df6','first','ada','default','standard',2,NULL,'done','finished',1,1795388416694582,1795388416839698,'{"run":["true"],"gpus":2,"gpu":null,"gpu_milli":1000,"version":1,"name":"first","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{},"secrets":[],"cwd":null,"files":null}');
INSERT INTO "jobs" VALUES('woe-76s46r','woe','ada','default','standard',1,NULL,'failed','3 attempts in a row without a checkpoint; woe-76s46r.3 rank 0 exited with 1',3,1795388416711755,1795388417166799,'{"run":["false"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"woe","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{},"secrets":[],"cwd":null,"files":null}');
INSERT INTO "jobs" VALUES('last-biutq4','last','ada','default','standard',1,NULL,'running','',1,1795388423904938,NULL,'{"run":["sleep","60"],"gpus":1,"gpu":null,"gpu_milli":1000,"version":1,"name":"last","launch":"auto","tier":"standard","capacity":"any","queue":"default","priority":0,"estimate_s":null,"cpus":null,"memory_bytes":null,"place":{"unit":null,"within":null},"elastic":{"at_least":null,"sizes":[]},"limit":{"time_s":null,"cost_micro_usd":null,"preemptions":null},"checkpoint":{"to":null,"every_s":"auto","keep":2,"ram_s":"auto","base":null},"on_preempt":{"grace_s":30.0,"then":"requeue"},"on_hang":{"report_after_s":60.0,"restart_after_s":null},"model":null,"plan":null,"env":{},"secrets":[],"cwd":null,"files":null}');
CREATE TABLE join_tokens (
	hash VARCHAR NOT NULL, 
	expires_us BIGINT NOT NULL, 
	uses INTEGER NOT NULL, 
	used INTEGER NOT NULL, 
	"by" VARCHAR NOT NULL, 
	PRIMARY KEY (hash)
);
INSERT INTO "join_tokens" VALUES('0000000000000000000000000000000000000000000000000000000000000000',1795389417750795,3,1,'ada');
CREATE TABLE leader (
	id INTEGER NOT NULL, 
	epoch BIGINT NOT NULL, 
	holder VARCHAR NOT NULL, 
	url VARCHAR NOT NULL, 
	expires_us BIGINT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE log (
	number BIGINT NOT NULL, 
	at_us BIGINT NOT NULL, 
	kind VARCHAR NOT NULL, 
	job_id VARCHAR, 
	body TEXT NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "log" VALUES(17,1795388417058671,'AttemptEnded','woe-76s46r','{"kind": "AttemptEnded", "at_us": 1795388417058671, "job_id": "woe-76s46r", "epoch": 2, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.2 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(18,1795388417058671,'AttemptPlaced','woe-76s46r','{"kind": "AttemptPlaced", "at_us": 1795388417058671, "job_id": "woe-76s46r", "epoch": 3, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(19,1795388417108933,'RanksStarted','woe-76s46r','{"kind": "RanksStarted", "at_us": 1795388417108933, "job_id": "woe-76s46r", "epoch": 3, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
INSERT INTO "log" VALUES(20,1795388417130094,'RanksEnded','woe-76s46r','{"kind": "RanksEnded", "at_us": 1795388417130094, "job_id": "woe-76s46r", "epoch": 3, "node": "local", "outcome": "failed", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}, "why": "rank 0 exited with 1"}');
INSERT INTO "log" VALUES(21,1795388417166799,'AttemptEnded','woe-76s46r','{"kind": "AttemptEnded", "at_us": 1795388417166799, "job_id": "woe-76s46r", "epoch": 3, "outcome": "failed", "why": "rank 0 exited with 1", "failure": {"rank": 0, "exit_code": 1, "signal": null, "tail": ["cordee: attempt woe-76s46r.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]}}');
INSERT INTO "log" VALUES(22,1795388417166799,'JobEnded','woe-76s46r','{"kind": "JobEnded", "at_us": 1795388417166799, "job_id": "woe-76s46r", "state": "failed", "why": "3 attempts in a row without a checkpoint; woe-76s46r.3 rank 0 exited with 1"}');
INSERT INTO "log" VALUES(23,1795388423150985,'ServerUp',NULL,'{"kind": "ServerUp", "at_us": 1795388423150985}');
INSERT INTO "log" VALUES(24,1795388423904938,'JobSubmitted','last-biutq4','{"kind": "JobSubmitted", "at_us": 1795388423904938, "job": {"job_id": "last-biutq4", "name": "last", "owner": "ada", "gpus": 1, "queue": "default", "tier": "standard", "priority": 0, "gpu_name": null, "capacity": "any", "time_limit_us": null, "cost_limit_micro_usd": null, "grace_us": 30000000, "requeue": true, "protected": false, "checkpoint_every_us": 1800000000, "save_us": 30000000, "restart_us": 60000000, "min_run_us": 60000000, "gpu_milli": 1000, "cpu_milli": 0, "memory_bytes": 0, "unit_gpus": null, "within": null, "sizes": [], "estimate_us": null, "preemptions_max": null, "estimates": []}, "spec": "{\"run\":[\"sleep\",\"60\"],\"gpus\":1,\"gpu\":null,\"gpu_milli\":1000,\"version\":1,\"name\":\"last\",\"launch\":\"auto\",\"tier\":\"standard\",\"capacity\":\"any\",\"queue\":\"default\",\"priority\":0,\"estimate_s\":null,\"cpus\":null,\"memory_bytes\":null,\"place\":{\"unit\":null,\"within\":null},\"elastic\":{\"at_least\":null,\"sizes\":[]},\"limit\":{\"time_s\":null,\"cost_micro_usd\":null,\"preemptions\":null},\"checkpoint\":{\"to\":null,\"every_s\":\"auto\",\"keep\":2,\"ram_s\":\"auto\",\"base\":null},\"on_preempt\":{\"grace_s\":30.0,\"then\":\"requeue\"},\"on_hang\":{\"report_after_s\":60.0,\"restart_after_s\":null},\"model\":null,\"plan\":null,\"env\":{},\"secrets\":[],\"cwd\":null,\"files\":null}"}');
INSERT INTO "log" VALUES(25,1795388423938908,'AttemptPlaced','last-biutq4','{"kind": "AttemptPlaced", "at_us": 1795388423938908, "job_id": "last-biutq4", "epoch": 1, "leases": [{"node": "local", "gpus": [0], "milli": 1000}]}');
INSERT INTO "log" VALUES(26,1795388424050897,'RanksStarted','last-biutq4','{"kind": "RanksStarted", "at_us": 1795388424050897, "job_id": "last-biutq4", "epoch": 1, "node": "local", "launch": "one process per slot: 1 on this node, 1 in the gang (launch: auto)"}');
CREATE TABLE marks (
	source VARCHAR NOT NULL, 
	seq BIGINT NOT NULL, 
	PRIMARY KEY (source)
);
INSERT INTO "marks" VALUES('lease_ms',30000);
INSERT INTO "marks" VALUES('node/local/1',10);
CREATE TABLE retired (
	job_id VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (job_id)
);
INSERT INTO "retired" VALUES('first-ka3df6','[[["first-ka3df6","first","ada",2,"default","standard",0,null,"any",null,null,30000000,true,false,1800000000,30000000,60000000,60000000,1000,0,0,null,null,[],null,null,[]],1795388416694582,1795388416839698,"done",1,0,0,118205,236410,706865900000,null,null,[1795388416839698,"first-ka3df6",1,"finished","every process exited with 0",null],[1795388416839698,"first-ka3df6","done","finished"]],[["first-ka3df6",1,"ada","default",2,1795388416700279,1795388416818484,"finished",[0,0,0,0,0,236410],[0,0,0,0,0,196],null,null,0,0,0,["each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)"]]],[["first-ka3df6",1,1795388416700279,2,null,0,0,0,null,null,null,null,null,null,null]],[]]');
INSERT INTO "retired" VALUES('woe-76s46r','[[["woe-76s46r","woe","ada",1,"default","standard",0,null,"any",null,null,30000000,true,false,1800000000,30000000,60000000,60000000,1000,0,0,null,null,[],null,null,[]],1795388416711755,1795388417166799,"failed",3,3,0,255529,255529,764031710000,null,null,[1795388417166799,"woe-76s46r",3,"failed","rank 0 exited with 1",[0,1,null,["cordee: attempt woe-76s46r.3 on local: one process per slot: 1 on this node, 1 in the gang (launch: auto)"]]],[1795388417166799,"woe-76s46r","failed","3 attempts in a row without a checkpoint; woe-76s46r.3 rank 0 exited with 1"]],[["woe-76s46r",1,"ada","default",1,1795388416839698,1795388416947322,"failed",[0,0,0,0,107624,0],[0,0,0,0,89,0],"failure",null,0,0,0,["each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)"]],["woe-76s46r",2,"ada","default",1,1795388416966764,1795388417043246,"failed",[0,0,0,0,76482,0],[0,0,0,0,63,0],"failure",null,0,0,0,["each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)"]],["woe-76s46r",3,"ada","default",1,1795388417058671,1795388417130094,"failed",[0,0,0,0,71423,0],[0,0,0,0,59,0],"failure",null,0,0,0,["each CPU slot accounted as one H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)"]]],[["woe-76s46r",1,1795388416839698,1,null,0,0,0,null,null,null,null,null,null,null],["woe-76s46r",2,1795388416966764,1,null,0,0,0,null,null,null,null,null,null,null],["woe-76s46r",3,1795388417058671,1,null,0,0,0,null,null,null,null,null,null,null]],[]]');
CREATE TABLE secrets (
	job_id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	sealed TEXT NOT NULL, 
	PRIMARY KEY (job_id, name)
);
INSERT INTO "secrets" VALUES('last-biutq4','KEY','gAAAA-sealed-by-a-key-of-another-home');
CREATE TABLE segments (
	first BIGINT NOT NULL, 
	last BIGINT NOT NULL, 
	hash VARCHAR NOT NULL, 
	body BLOB NOT NULL, 
	PRIMARY KEY (first), 
	UNIQUE (last)
);
INSERT INTO "segments" VALUES(1,8,'0dcb791911838115425861b44f574f07',X'78DAED574B6FE33610BEF757103AEDA2892B59B62CE7B6680B1445B7583458A0401C0834358AD848A49694E27503FFF7CE9092A53CBCC86E815E1A5F2C7E9CF77C1C89F7C1AD547970C1824B3077603E36C1190B789B7516C168B55EC669BA8816EB68B55AA687EFEE8FF2BFEB1C4E4827D122499673DC5228843BF781E2353D049516BC222568B42849099F6F9A2E1B046CA5DBC06364938C08DE7021DB3D6D6B759E43CD3104DCA8A5301A7DE7590326232BA5EE0C69ADD721FE50A4315240661116CE3C7051B21F3F7C64E487712174A75AC819B74C2B60BF4461C88E3E2ED86FBCDEE6DCC3977FBE3F23B94F9D268DED9E894A16850034606642D767ECDDFB9F9854051850021808AD34C668D99B79384FCEC3E57994BEA5C0735D73A9309EAB6B5C495BA1B3ACCF98A2EE14BFE3B2E2DB0A06A10994EDCAFD005B5DB43B6E9C5820B4C90158388B6621B969F66DA9158B6751345B11D06A83E9CF67513C0BBF174D179009FCCF6A5955920AE7AB5643ADCD3EDBEE5B704D58CE57C9325AC4E18236B18452B96ADED53F843C8E8B740B8BF9621BF11082C39424BFEAED65B7AD658B157B9E2AC97AB14CA9CB7FE9AD630AFE67D22917D2D8F6FC96C7799190F240118713A0770AA8DD01CFF923CE7CEAA073C23914BCAB9C782BBDB46DB1DCDCB880901FDA786E850F99A8BAAA7A443EAEF6DE4E0D5925312B9FCC20A96DDBC347628EBB378623119D7C1CFA1FA20686405BD3818B07C925A85A17ACE095254C94206E1B2D559B011ED17D5FC2341CED587EF79C71CCD4F44126235E4B95994E3DC16F2644883C34E5C633C4F05CC584FBCAF7B9EE645B3A7AF76B2BFF76E28EB11894AC790B0F6AD71880BA69A55636ABF9E7716390F6EA0732D680A066DC6F024C62135C5C6D022ADE06C9BC7114406CEE1FF1C9D9D98CB921E472DB04584A8B0E09C015751D1F379E5D9B00A18A774A940EE45DAB1D461C72C84022870E24F1B26AEF40D75987F41C74E84038DCA0208ED5B063ACC2E7D0AFA6251FD1A6423AE112AB400D18377CEDFBF5813C541C7D082F8BE7AF026E27F2AE3754C56B1276F4F5A28EE5D3A888DE47624F22195B37F13A72B6B7A6470D4F62FBB0B0B7004DDF38C3EBC7BB5B6E61625DABAC77EBADFBC3453A7138A3B2B6252867A13F609BA0572BB9BAF13A06DF4078387881D3DBA9265E753835E3C6E0B5C69759F5A0056A9294BA23BB24674118687D51A914BB49B50A591DDB7808A6A3F21DCE484CE80335F6C4AC5C85E17CB5F6B3F2C48C9CBE56A9D3FEE0DC0F2FE2F1FDDB9FD82B3CC2D1B51B0AE3C13F5C7FDD0C5F45D16AB97C7686EF349CAF12BB48CC748223FA85F91DBDCEEFFFD9FC76957A30C0A36F1FE048AED7F1FD3ABEFFE3F1FD0757B7F6925C9F9C928B38721FD02F9BDE4F26B6E7B3BF0401C34123C05A86371F7797C1CF5EBCB830648F65A47A866B496B60375834F6C6AB5F306ACADBA7A1FFACF25381A751BA48FF45E0BA6BF176D47FBA2B694BEFA8C0EB4C6726A3DA5F6B3CBF8EF9C16749B72D3A172C7CEE85F9A5C0E375B24E5F1CF889385F10D6936C0EFF00B616E119');
INSERT INTO "segments" VALUES(9,16,'c6c16f406d6f158054b82c7418bd03f3',X'78DAD593B16EC2301086F73EC5C9532B416592E0906C1DBA74AADA1121641293B8183B8A1DD10AF1EEF52552A904450155A8DD7C67FF779F7FFBB66425754E52204F66F1A87391930110EEE68DF5C9519C8CC3C9241AB14998B064E2B7DECC622E5BC152D6D60D573CCC970C45D671277023375A6062537E74E7B4B4A52FBCBBD97E757B704EAC2BF7AC787646CB8D11C398D988D5281195C94A94F8B512DC0AD44FB7449BBCE55026E30A0F16555B7A4A673E584BA524AA28A5BBD977A617AE57F6D5F1DAFD8494D03008C39E4807188A37BADD25DE20A86A93096BA1123558659C1781D1E04A6901A5031F4B8C05145C1770DBC953E08D3377E400FCC4E325511C06C1A5D8A6719959B7B92597AA6B82ABA6C6E496D4BEBD5F502CF42EDD3CEB2A60312B0BEDABA4A01BA57CECBC0C5F8264A6CE85F097E9FE01EC79EE5B1BDAEE29FC8251B3DDFE2B222950404A91C346BA1246C7BEE5292F198B59D4D3CBA3D69D62F967CE9E39D1BDBD0BAE35D131A57134663D91FECC44C7340A83E862EC6B4F7470ED89FE04187B0C9E');
CREATE TABLE servers (
	url VARCHAR NOT NULL, 
	seen_us BIGINT NOT NULL, 
	PRIMARY KEY (url)
);
CREATE TABLE snapshots (
	number BIGINT NOT NULL, 
	at_us BIGINT NOT NULL, 
	version VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	body BLOB NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "snapshots" VALUES(22,1795388417166799,'0.1.0-3f8377521f2ada23','13a5572e12eac75f63ed1a50aef9af19',X'7801ED55C18ADB3010FD15A1534B6557922559DA5B690F3D74A1500A05E38362CB6CC0B1B74EDCB22CF9F7CEC8B1D71B9AF4B0973D5404634DE4A799376F660A2999C89DCEAC552217C6E4CEB1A2F1ED3EB0C763FCD1B6AF7C4B6F8AE2F4C604A3FBB63F502619EDBBA40E3BDFD5B0738EC36234F8EA8E7CFCFA9DE029E2ABAA1FBB43A889DF93BE0BE4B3E01C5E4EDFDD902F7EB7A9FD64FEF6E396E1B99F638F5F6C1E48D56E9BA60A0030A455BF63E4C3ED27B2ED9A3084AE0A24547DD7EFB6D59EBC915C9A84EB44D8B7941525E3F8C01FADFAA10E81F054A49C327AFF70B8EB3B92A542A439EC0FFD000ECB5464297F57DD8FB4641203915AE6460B9571C5E8AFDD7BEEB3ACB19BA0A4DA08CF039C3B0C636094B289B16E6C5B161F8B09FD2881C885C5E8159F8C9160F4101698804FA086974CA0090D6231804B18CB922B930B916BCD84C1B325335C59641F172B26F7F1751D8376F391359050C6E8080E092F8AD50D9CCB1CD440EBD0F8B1857C535F7BCAB27809FA39DD838EAEA0C1FC84618555565DC548A2B308925C44C99C71F62A0A12071010F0A442D896CF3C712ACF40ECD7A2491690E4220A5488B91ECF02720123E72A93CABCD0939C6B0B1AB88AF24F4F04A4D25D8FE6022725287A960574066D799E3B6E0050092EB573C2690ECFCC9CF282E508C28C392A6341BCECF3232417F50A8EC42A7A4403AC49A2B4D90E7B14EC7C099328066125D7288BD3B133E3D9F604F5BB0F6B20AC4DA9B5966E0574665C6FA35BAFCFAB99372861E83118CA52B4F31898894586A726750A6326153E823E07FA992A0F9B0DF2C264664005F0EF6217D0C85CEC54B4F1DB761C80D2F9B01070FB7C1224F21AC64709EB6F8C2C5DFCFF283C1F855085333B381457DB38CA904E187ACF46616CFCAB9E7F9CC6EE938509AD6CA635F61065A4D35628DCE0C2042D0A2D205F7F00351B5BEC');
CREATE INDEX ix_log_job_id ON log (job_id);
CREATE INDEX ix_jobs_name ON jobs (name);
COMMIT;
