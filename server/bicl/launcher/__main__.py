from bicl.launcher.main import main

main()
